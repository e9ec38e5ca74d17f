"""Folders of YOLO, Pascal VOC and Roboflow that are read without conversion."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from bucketrank.cli import main
from bucketrank.data import CocoDataset, Split, check, find_splits
from bucketrank.data.layouts import find_split
from bucketrank.data.shapes import CLASSES
from bucketrank.errors import DataError
from bucketrank.training.folder import fingerprint_of
from tests.data.label_folders import WRITERS, drawn, label_folder, ultralytics
from tests.data.other_formats import voc_folder, voc_object, write_text, yolo_folder
from tests.data.small_folders import write_image
from tests.training.tiny import USUAL


def both(folder: Path, layout: str | None = None) -> tuple[Split, Split]:
    train, val = find_splits(folder, layout=layout)
    assert train is not None
    assert val is not None
    return train, val


def split_of(folder: Path) -> Split:
    return both(folder)[0]


@pytest.mark.parametrize("name", WRITERS)
def test_every_layout_gives_the_objects_that_were_written(name: str, tmp_path: Path) -> None:
    folder, content = label_folder(name, tmp_path)
    for split, expected in zip(both(folder), (content["train"], content["val"]), strict=True):
        assert check(split, workers=1) == []
        data = CocoDataset(split)
        written = {file: entries for file, _, entries in expected}
        assert len(data) == len(written)
        # VOC's export has no list of classes: those that occur, in alphabetical order.
        assert data.class_names == (sorted(CLASSES) if "voc" in name else list(CLASSES))
        for index in range(len(data)):
            _, target = data[index]
            entries = written[Path(data._files[index]).name]
            corners = torch.tensor([[x, y, x + w, y + h] for x, y, w, h in (each["bbox"] for each in entries)])
            torch.testing.assert_close(target["boxes"].as_subclass(torch.Tensor), corners.float(), atol=1e-4, rtol=0)
            labels = [CLASSES[each["category_id"] - 1] for each in entries]
            assert [data.class_names[label - 1] for label in target["labels"]] == labels
    assert not (folder / "train.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ultralytics", "roboflow_yolo", "roboflow_coco", "roboflow_voc", "voc"])
def test_every_layout_is_trained_on(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, content = label_folder(name, tmp_path)
    data, run = (folder / "data.yaml" if name == "ultralytics" else folder), tmp_path / "run"
    before = sorted(folder.rglob("*"))
    flags = [*USUAL.split(), "--schedule.max_steps", "1", "--trainer.calibrate", "false", "--out", str(run)]
    assert main(["train", "atss-laptop", str(data), *flags]) == 0
    assert main(["eval", str(run)]) == 0
    images = next(folder.rglob(content["val"][0][0])).parent
    assert main(["predict", str(run), str(images), "--out", str(tmp_path / "found")]) == 0
    assert json.loads((tmp_path / "found/predictions.json").read_text())["annotations"]
    if name == "ultralytics":
        assert main(["split", str(data), str(tmp_path / "new"), "--val", "0.5"]) == 0
        assert main(["check-data", str(tmp_path / "new")]) == 0
        assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert "could not be measured" not in page
        assert "no longer at" not in page
        capsys.readouterr()
        main(["calibrate", str(run), "--max-images", "4"])
        assert "10 detections that are right" in capsys.readouterr().err, "after one step there are too few"
    assert sorted(folder.rglob("*")) == before, "nothing is written next to the images"


def test_a_folder_without_subsets_is_divided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(20):
        write_image(tmp_path / f"yolo/images/{number}.jpg")
        write_text(tmp_path / f"yolo/labels/{number}.txt", "0 0.5 0.5 0.5 0.5\n")
    train, val = both(tmp_path / "yolo")
    assert (len(train.read()["images"]), len(val.read()["images"])) == (18, 2)
    assert main(["check-data", str(tmp_path / "yolo")]) == 0
    printed = capsys.readouterr().out
    assert "training keeps a tenth of the images for validation" in printed
    assert f"bucketrank split {tmp_path / 'yolo'} NEW-FOLDER" in printed
    beside = voc_folder(tmp_path / "voc", a=voc_object("cat", 1, 1, 9, 9), b=voc_object("ant", 1, 1, 9, 9))
    for path in [*beside.glob("Annotations/*"), *beside.glob("JPEGImages/*")]:
        path.rename(beside / path.name)
    for name in ("Annotations", "JPEGImages"):
        (beside / name).rmdir()
    assert len(split_of(beside).whole.read()["images"]) == 2
    assert [each["name"] for each in split_of(beside).read()["categories"]] == ["ant", "cat"]


def test_a_folder_that_fits_several_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = yolo_folder(tmp_path / "yolo")
    shutil.copytree(voc_folder(tmp_path / "voc", a=voc_object("cat", 1, 1, 9, 9)), folder, dirs_exist_ok=True)
    with pytest.raises(DataError, match=r"several layouts:\n  yolo: .*\n  voc: .*\n.*--data\.layout yolo"):
        find_splits(folder)
    assert both(folder, "yolo")[0].read()["categories"][1]["name"] == "dog"
    assert both(folder / "data.yaml")[0] == both(folder, "yolo")[0], "the yaml file chooses YOLO"
    assert len(both(folder, "voc")[0].read()["categories"]) == 20
    assert main(["check-data", str(folder)]) == 1
    assert "fits several layouts" in capsys.readouterr().err
    assert main(["check-data", str(folder), "--layout", "yolo"]) == 0


def test_data_yaml_may_lie_elsewhere(tmp_path: Path) -> None:
    content = drawn(tmp_path / "drawn")
    ultralytics(tmp_path / "drawn", tmp_path / "datasets/shapes", content)
    names = f"names: [{', '.join(CLASSES)}]\n"
    for root in ("../datasets/shapes", str(tmp_path / "datasets/shapes")):
        file = tmp_path / "configs/shapes.yaml"
        write_text(file, f"path: {root}\ntrain: images/train\nval: images/val\n{names}")
        assert len(split_of(file).read()["images"]) == 4
        with pytest.raises(DataError, match="'images/train' for train, which has no images; correct the path"):
            find_splits(file.parent)  # a folder is not left, only a file that the user names
    absolute = "".join(f"{tmp_path}/datasets/shapes/images/train/{name}\n" for name, _, _ in content["train"])
    write_text(tmp_path / "datasets/shapes/train.txt", absolute)
    write_text(tmp_path / "datasets/shapes/data.yaml", f"train: train.txt\nval: images/val\n{names}")
    assert len(split_of(tmp_path / "datasets/shapes").read()["images"]) == 4


BAD_LINES = [
    ("0 0.5 0.5 20 10", "bad-label", "divide pixels by the width and height"),
    ("0 0.5 0.5 0.1", "bad-label", "got 3 numbers"),
    ("0 0.5 0.5 0.1 0.1 0.9", "bad-label", "remove the last one if it is a confidence"),
    ("0.5 0.5 0.5 0.1 0.1", "bad-label", "expected a class number from 0, got '0.5'"),
    ("0 0.5 0.5 -0.005 0.1", "bad-label", "a width and a height of at least 0"),
    ("7 0.5 0.5 0.1 0.1", "unknown-category", "class 7 has no name among the 2 of data.yaml"),
    ("0 0.5 0.5 0 0.1", "box-without-area", "has no area"),
    ("0 0.95 0.5 0.3 0.1", "box-sticks-out", "sticks out by 4 pixels"),
]


@pytest.mark.parametrize(("line", "code", "message"), BAD_LINES)
def test_messages_name_the_label_file_and_the_line(line: str, code: str, message: str, tmp_path: Path) -> None:
    folder = yolo_folder(tmp_path / "yolo")
    write_text(folder / "labels/train/a.txt", f"1 0.5 0.5 0.5 0.2\n\n{line}\n")
    (problem,) = check(split_of(folder), workers=1)
    assert (problem.code, problem.file, problem.id) == (code, str(folder / "labels/train/a.txt"), "line 3")
    assert message in problem.message


def test_a_class_may_be_written_as_a_float(tmp_path: Path) -> None:
    folder = yolo_folder(tmp_path / "yolo")
    write_text(folder / "labels/train/a.txt", "1.0 0.5 0.5 0.5 0.2\n")
    assert check(split_of(folder), workers=1) == []
    assert [entry["category_id"] for entry in split_of(folder).read()["annotations"]] == [2]


def test_a_yaml_file_may_name_a_test_folder_that_does_not_exist(tmp_path: Path) -> None:
    folder = yolo_folder(tmp_path / "yolo")  # Roboflow's data.yaml names ../test/images, with or without one
    with (folder / "data.yaml").open("a", encoding="utf-8") as file:
        file.write("test: ../test/images\n")
    assert [split is not None for split in find_splits(folder)] == [True, True]
    with pytest.raises(DataError, match="expected a split 'test' with annotations, got none; choose train or val"):
        find_split(folder, "test")


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("nc: 3\nnames: [cat, dog]\n", "expected nc to be the number of names, 2, got 3"),
        ("", "expected names, train and val, got an empty file"),
    ],
)
def test_a_yaml_file_that_contradicts_itself(
    yaml: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = yolo_folder(tmp_path / "yolo")
    write_text(folder / "data.yaml", yaml)
    assert main(["check-data", str(folder)]) == 1
    printed = capsys.readouterr()
    assert message in " ".join((printed.out + printed.err).replace("│", " ").split())


def test_a_file_is_not_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(
        DataError, match=r"notes\.txt: expected the data set folder or its data\.yaml, got another file"
    ):
        find_splits(tmp_path / "notes.txt")


def test_all_problems_are_listed_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = yolo_folder(tmp_path / "yolo")
    write_text(folder / "labels/train/a.txt", "\n".join(line for line, _, _ in BAD_LINES))
    (folder / "images/train/empty.jpg").write_bytes(b"no image")
    assert main(["check-data", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "7 errors, 2 warnings: training refuses this data." in printed
    assert main(["train", "atss-laptop", str(folder), *USUAL.split(), "--out", str(tmp_path / "run")]) == 1
    told = capsys.readouterr().err
    assert "5 bad-label" in told
    assert "labels/train/a.txt: line 2: expected a class and 4 numbers" in told


def test_messages_name_the_xml_file_and_the_line(tmp_path: Path) -> None:
    objects = (
        f"\n{voc_object('cat', 1, 1, 9, 9)}\n{voc_object('cat', 30, 20, 20, 30)}\n{voc_object('dog', 50, 1, 60, 9)}"
    )
    folder = voc_folder(tmp_path / "voc", a=objects, b="", c="<object/>")
    (folder / "JPEGImages/b.jpg").unlink()
    write_text(folder / "Annotations/d.xml", "<annotation>")
    split = split_of(folder).whole
    problems = {(Path(each.file).name, each.id): each for each in check(split, workers=1)}
    assert {key: each.code for key, each in problems.items()} == {
        ("a.xml", "line 4"): "bad-label",
        ("a.xml", "line 6"): "box-outside",
        ("b.jpg", None): "image-missing",
        ("c.xml", "line 1"): "bad-label",
        ("d.xml", None): "bad-label",
    }
    assert "expected xmin <= xmax and ymin <= ymax" in problems["a.xml", "line 4"].message
    assert "line 1, column 12: not XML" in problems["d.xml", None].message


def test_a_broken_yaml_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path / "data.yaml", "train: [\n")
    with pytest.raises(DataError, match=r"data\.yaml: not YAML"):
        find_splits(tmp_path)
    folder = yolo_folder(tmp_path / "yolo", "train: images/train\nval: images/val\nnames: cat\n")
    assert main(["check-data", str(folder)]) == 1
    assert "expected names in data.yaml as a list" in capsys.readouterr().out.replace("\n", " ")


def test_images_that_are_links_are_read(tmp_path: Path) -> None:
    folder = yolo_folder(tmp_path / "yolo")
    (folder / "images").rename(tmp_path / "elsewhere")
    (folder / "images").symlink_to(tmp_path / "elsewhere")
    assert check(split_of(folder), workers=1) == []


def test_only_test_images_are_evaluated_but_not_trained_on(tmp_path: Path) -> None:
    folder = yolo_folder(tmp_path / "yolo", "test: images/train\nnames: [cat, dog]\n")
    with pytest.raises(DataError, match=r"got only test; name the folders or files train and val"):
        find_splits(folder)
    assert len(find_split(folder / "data.yaml", "test").read()["images"]) == 2
    shutil.rmtree(folder / "labels")
    with pytest.raises(DataError, match="a split 'test' with annotations, got images without annotations; annotate"):
        find_split(folder, "test")


@pytest.mark.parametrize("name", ["roboflow_yolo", "roboflow_coco", "roboflow_voc", "voc"])
def test_the_test_split_of_every_layout(name: str, tmp_path: Path) -> None:
    folder, content = label_folder(name, tmp_path)
    if name != "roboflow_yolo":  # its writer writes the validation images as test images too
        with pytest.raises(DataError, match="expected a split 'test' with annotations, got none; choose train or val"):
            find_split(folder, "test")
        old, new = ("ImageSets/Main/val.txt", "ImageSets/Main/test.txt") if name == "voc" else ("valid", "test")
        (folder / old).rename(folder / new)
    test = find_split(folder, "test")
    assert check(test, workers=1) == []
    assert sorted(Path(file).name for file in CocoDataset(test)._files) == sorted(file for file, _, _ in content["val"])


def test_the_fingerprint_sees_a_changed_label(tmp_path: Path) -> None:
    folder = yolo_folder(tmp_path / "yolo")
    splits = both(folder)
    before = fingerprint_of(*splits, masks=False)
    write_text(folder / "labels/train/a.txt", "1 0.5 0.5 0.5 0.25\n")
    assert fingerprint_of(*splits, masks=False).changes(before) == [], "a data set is read once"
    (changes,) = before.changes(fingerprint_of(*both(folder), masks=False))
    assert changes == "train: 1 annotation removed, 1 annotation changed"


def test_a_data_set_is_read_once_and_workers_get_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = split_of(yolo_folder(tmp_path / "yolo"))
    first = split.read()
    first["images"].clear()
    monkeypatch.setattr("bucketrank.data.yolo.YoloLabels.parse", lambda *_: os.abort())
    assert len(split.read()["images"]) == 2, "every reader gets its own document"
    assert split.labels is not None
    assert split.labels._parsed
    assert pickle.loads(pickle.dumps(split)).labels._parsed == {}


def test_keypoints_are_dropped(tmp_path: Path) -> None:
    """A line of a pose data set looks like a polygon, whose extent is not the box."""
    yaml = "kpt_shape: [2, 2]\ntrain: images/train\nval: images/val\nnames: [cat, dog]\n"
    folder = yolo_folder(tmp_path / "yolo", yaml)
    label = next((folder / "labels/train").glob("*.txt"))
    label.write_text("0 0.5 0.5 0.2 0.4 0.45 0.4 0.55 0.4\n")
    (entry,) = split_of(folder).read()["annotations"]
    width, height = 40, 30
    assert entry["bbox"] == pytest.approx([0.4 * width, 0.3 * height, 0.2 * width, 0.4 * height])
    assert not entry.get("segmentation")
    label.write_text("0 0.5 0.5 0.2 0.4 0.45 0.4 2 0.55 0.4 2\n")
    assert [problem.message for problem in check(split_of(folder), workers=1) if problem.code == "bad-label"] == [
        "expected a class, 4 numbers and 4 of keypoints (kpt_shape), got 10 numbers; correct the line or kpt_shape"
    ]
    (folder / "data.yaml").write_text(yaml.replace("[2, 2]", "17"))
    with pytest.raises(DataError, match=r"expected kpt_shape as \[keypoints, 2 or 3\], got 17"):
        split_of(folder).read()


def test_classes_txt_has_one_name_per_line(tmp_path: Path) -> None:
    folder = yolo_folder(tmp_path / "yolo", None)
    (folder / "classes.txt").write_text("cat\ndog\n\n")
    assert CocoDataset(split_of(folder)).class_names == ["cat", "dog"]
    (folder / "classes.txt").write_text("cat\n\ndog\n")
    with pytest.raises(DataError, match=r"classes.txt: expected a name in every line, got an empty one"):
        split_of(folder).read()


def test_labels_in_the_wrong_place_are_named(tmp_path: Path) -> None:
    folder = yolo_folder(tmp_path / "yolo")
    write_text(folder / "labels/train/typo.txt", "0 0.5 0.5 1 1\n")
    train, _ = both(folder)
    assert [(problem.code, Path(problem.file).name, problem.severity) for problem in check(train, workers=1)] == [
        ("no-image", "typo.txt", "warning")
    ]
    (folder / "labels").rename(folder / "Labels")
    with pytest.raises(DataError, match=r"labels/train/a.txt: there is no label file for any of the 2 images; "):
        split_of(folder).read()
    (problem,) = check(both(folder)[1], workers=1)
    assert (problem.code, problem.severity) == ("no-labels", "warning"), "validation may have no objects"


def test_data_for_evaluation_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = yolo_folder(tmp_path / "yolo", None)
    (folder / "images/train").rename(folder / "images/Train")
    assert main(["check-data", str(folder)]) == 0
    assert "the data can be evaluated on; there are no images for training." in capsys.readouterr().out
    assert main(["train", "atss-laptop", str(folder), "--out", str(tmp_path / "run")]) == 1
    assert "expected annotations for training too, got only these for validation" in capsys.readouterr().err
