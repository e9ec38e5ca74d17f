"""Conversion of small folders in other formats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bucketrank.cli import main
from bucketrank.data import CocoDataset, check, find_splits
from bucketrank.data.convert import convert_cityscapes, convert_voc, convert_yolo
from bucketrank.errors import DataError
from tests.data.other_formats import cityscapes_folder, voc_folder, voc_object, write_text, yolo_folder
from tests.data.small_folders import write_image


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


# Cityscapes


def test_cityscapes(tmp_path: Path) -> None:
    train, val = convert_cityscapes(cityscapes_folder(tmp_path / "source"), tmp_path / "new")
    assert (train.images, train.objects, train.crowds) == (val.images, val.objects, val.crowds) == (1, 2, 1)
    document = read(train.annotations)
    assert [c["name"] for c in document["categories"]] == (
        ["person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"]
    )
    annotations = {(each["category_id"], each["iscrowd"]): each for each in document["annotations"]}
    assert annotations[26, 0]["bbox"] == [3, 2, 6, 10]
    assert annotations[26, 0]["area"] == 6 * 10 - 2 * 4, "without the part that the person occludes"
    assert annotations[24, 0]["bbox"] == [5, 4, 15, 2]
    assert annotations[24, 1]["bbox"] == [0, 20, 30, 8]
    splits = find_splits(tmp_path / "new")
    assert splits.train is not None
    assert check(splits.train, masks=True) == []
    data = CocoDataset(splits.train, masks=True)
    assert data.num_classes == 8
    assert sorted(data.labels_of(0)) == [1, 3]


def test_cityscapes_without_annotations(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Unpack gtFine_trainvaltest"):
        convert_cityscapes(tmp_path, tmp_path / "new")
    source = cityscapes_folder(tmp_path / "source")
    next(source.glob("leftImg8bit/val/*/*.png")).unlink()
    with pytest.raises(DataError, match="the image does not exist"):
        convert_cityscapes(source, tmp_path / "new")


# Pascal VOC


def test_voc(tmp_path: Path) -> None:
    hard = voc_object("dog", 5, 6, 10, 12, difficult="<difficult>1</difficult>")
    source = voc_folder(
        tmp_path / "voc", a=voc_object("cat", 1, 1, 40, 30) + hard, b="", c=voc_object("dog", 3, 4, 3, 4)
    )
    write_text(source / "ImageSets/Main/train.txt", "a\nb\n")
    write_text(source / "ImageSets/Main/val.txt", "c 1\n")
    train, val = convert_voc(source, tmp_path / "new")
    assert (train.images, train.objects, train.crowds) == (2, 1, 1)
    document = read(train.annotations)
    assert len(document["categories"]) == 20, "VOC's own: every class that occurs is one of them"
    names = {c["id"]: c["name"] for c in document["categories"]}
    first, second = document["annotations"]
    assert (names[first["category_id"]], first["bbox"], first["iscrowd"]) == ("cat", [0, 0, 40, 30], 0)
    assert (names[second["category_id"]], second["bbox"], second["iscrowd"]) == ("dog", [4, 5, 6, 7], 1)
    assert read(val.annotations)["annotations"][0]["bbox"] == [2, 3, 1, 1], "one pixel"
    for split in find_splits(tmp_path / "new"):
        assert split is not None
        assert check(split) == []


def test_voc_of_other_classes_and_without_lists(tmp_path: Path) -> None:
    source = voc_folder(tmp_path / "voc", a=voc_object("zebra", 1, 1, 9, 9), b=voc_object("ant", 1, 1, 9, 9))
    (written,) = convert_voc(source, tmp_path / "new")
    assert written.annotations.name == "annotations.json"
    assert read(written.annotations)["categories"] == [{"id": 1, "name": "ant"}, {"id": 2, "name": "zebra"}]


def test_voc_names_may_have_spaces(tmp_path: Path) -> None:
    source = voc_folder(tmp_path / "voc", **{"my cat": "", "dog": ""})
    write_text(source / "ImageSets/Main/train.txt", "my cat\n")
    write_text(source / "ImageSets/Main/val.txt", "dog  1\n")
    train, val = convert_voc(source, tmp_path / "new")
    assert read(train.annotations)["images"][0]["file_name"] == "JPEGImages/my cat.jpg"
    assert read(val.annotations)["images"][0]["file_name"] == "JPEGImages/dog.jpg"


@pytest.mark.parametrize("stated", ["/home/me/photo.jpg", "C:\\photos\\a.jpg", "../../secret.jpg", "x" * 300])
def test_voc_with_a_path_outside_the_folder_uses_the_name_of_the_xml_file(stated: str, tmp_path: Path) -> None:
    source = voc_folder(tmp_path / "voc", a="")
    write_image(tmp_path / "secret.jpg")
    write_text(source / "Annotations/a.xml", f"<annotation><filename>{stated}</filename></annotation>")
    (written,) = convert_voc(source, tmp_path / "new")
    assert [image["file_name"] for image in read(written.annotations)["images"]] == ["JPEGImages/a.jpg"]
    (source / "JPEGImages/a.jpg").unlink()
    with pytest.raises(DataError, match=r"a\.xml: filename: the path .* (leaves the folder|is too long)"):
        convert_voc(source, tmp_path / "other")


def turn(path: Path, orientation: int) -> None:
    """Store an EXIF orientation in an image file."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    write_image(path, exif=exif)


@pytest.mark.parametrize("orientation", [3, 6])
def test_images_that_exif_turns_are_refused(orientation: int, tmp_path: Path) -> None:
    """Their boxes may refer to the image as it is shown."""
    source = yolo_folder(tmp_path / "yolo")
    turn(source / "images/val/a.jpg", orientation)
    with pytest.raises(DataError, match=r"images/val/a\.jpg: EXIF asks to rotate or mirror"):
        convert_yolo(source, tmp_path / "new")
    without_size = voc_folder(tmp_path / "voc", a="")
    turn(without_size / "JPEGImages/a.jpg", orientation)
    with pytest.raises(DataError, match=r"a\.jpg: EXIF asks to rotate or mirror"):
        convert_voc(without_size, tmp_path / "new")
    with_size = voc_folder(tmp_path / "voc2", a="<size><width>40</width><height>30</height></size>")
    turn(with_size / "JPEGImages/a.jpg", orientation)
    convert_voc(with_size, tmp_path / "new")


def test_voc_2007_has_trainval_and_test(tmp_path: Path) -> None:
    source = voc_folder(tmp_path / "voc", a="", b="")
    write_text(source / "ImageSets/Main/trainval.txt", "a\n")
    write_text(source / "ImageSets/Main/test.txt", "b\n")
    assert [each.annotations.name for each in convert_voc(source, tmp_path / "new")] == ["train.json", "val.json"]


def test_voc_with_trainval_and_val_does_not_train_on_the_validation_images(tmp_path: Path) -> None:
    source = voc_folder(tmp_path / "voc", a="", b="", c="")
    write_text(source / "ImageSets/Main/trainval.txt", "a\nb\nc\n")
    write_text(source / "ImageSets/Main/val.txt", "b\n")
    train, val = (read(each.annotations)["images"] for each in convert_voc(source, tmp_path / "new"))
    assert [each["file_name"] for each in train] == ["JPEGImages/a.jpg", "JPEGImages/c.jpg"]
    assert [each["file_name"] for each in val] == ["JPEGImages/b.jpg"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<annotation>", r"a\.xml: line 1, column 12: not XML"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><annotation>&a;</annotation>', r"a\.xml: has a DOCTYPE"),
        ("<annotation><object><name>cat</name></object></annotation>", r"bndbox is incomplete \(xmin is missing\)"),
        (f"<annotation>{voc_object('cat', 1, 2, 3, 4).replace('>2<', '>two<')}</annotation>", "bndbox is incomplete"),
        ("<annotation><object/></annotation>", r"a\.xml: line 1: an object has no name; add it"),
        ("<annotation><object><name> </name></object></annotation>", r"a\.xml: line 1: an object has no name; add it"),
        (
            "<annotation><size><width>30</width><height>40</height></size></annotation>",
            r"a\.xml: expected the size of a\.jpg, 40 x 30, got 30 x 40",
        ),
    ],
)
def test_voc_that_is_broken_or_malicious(text: str, message: str, tmp_path: Path) -> None:
    source = voc_folder(tmp_path / "voc", a="")
    write_text(source / "Annotations/a.xml", text)
    with pytest.raises(DataError, match=message):
        convert_voc(source, tmp_path / "new")


ENTITIES = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 9}">' for n in range(1, 10))  # 9 to the power of 9, if expanded


@pytest.mark.parametrize(
    "doctype",
    [
        f'<!DOCTYPE a [<!ENTITY e0 "x">{ENTITIES}]>',
        '<!DOCTYPE a [<!ENTITY e9 SYSTEM "file:///etc/hostname">]>',
        '<!DOCTYPE a SYSTEM "http://127.0.0.1:1/a.dtd">',
    ],
)
def test_voc_with_a_doctype_is_refused_before_entities_are_expanded(doctype: str, tmp_path: Path) -> None:
    source = voc_folder(tmp_path / "voc", a="")
    path = source / "Annotations/a.xml"
    write_text(path, f"{doctype}<annotation><filename>&e9;</filename></annotation>")
    with pytest.raises(DataError) as raised:
        convert_voc(source, tmp_path / "new")
    assert str(raised.value) == f"{path}: has a DOCTYPE, which VOC files do not have; remove it"


def test_voc_lists_that_leave_the_folder_or_name_missing_files(tmp_path: Path) -> None:
    source = voc_folder(tmp_path / "voc", a="")
    write_text(source / "ImageSets/Main/train.txt", "../../other\n")
    with pytest.raises(DataError, match="leaves the folder"):
        convert_voc(source, tmp_path / "new")
    write_text(source / "ImageSets/Main/train.txt", "b\n")
    with pytest.raises(DataError, match=r"b\.xml: does not exist"):
        convert_voc(source, tmp_path / "new")
    with pytest.raises(DataError, match="has no folder Annotations"):
        convert_voc(tmp_path, tmp_path / "new")


# YOLO


def test_yolo(tmp_path: Path) -> None:
    train, val = convert_yolo(yolo_folder(tmp_path / "yolo"), tmp_path / "new")
    assert (train.images, train.objects, val.images, val.objects) == (2, 2, 1, 1)
    document = read(train.annotations)
    assert document["categories"] == [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    box, polygon = document["annotations"]
    assert box["category_id"] == 2
    assert box["bbox"] == pytest.approx([10, 12, 20, 6])  # of 40 x 30, by the centre (20, 15)
    assert polygon["segmentation"] == [pytest.approx([10, 3, 20, 3, 20, 15])]
    assert polygon["bbox"] == pytest.approx([10, 3, 10, 12])
    assert polygon["area"] == pytest.approx(10 * 12 / 2)
    for split in find_splits(tmp_path / "new"):
        assert split is not None
        assert check(split) == []


@pytest.mark.parametrize(
    ("yaml", "names"),
    [
        ("path: ../datasets/x\ntrain: ../images/train\nval: images/val\nnames: {0: a, 1: b}\n", ["a", "b"]),
        ("path: /elsewhere\ntrain: [images/train]\nval: ./images/val\n", ["0", "1"]),
        ("train: list.txt\nval: images/val\nnames: [a, b]\n", ["a", "b"]),
        ("train: images/train\nvalid: images/val\n", ["0", "1"]),
        ("nc: 2\nnames: [a, b]\n", ["a", "b"]),
        ("names: [yes, no]\n", ["yes", "no"]),
        ("names: {0: off, 1: 007}\n", ["off", "007"]),
        ("names:\n  0: 2001-01-01\n  1: 'null'\n", ["2001-01-01", "null"]),
        ("classes: &classes {1: on}\nnames: {0: 1.50, <<: *classes}\n", ["1.50", "on"]),
        ("names:\n", ["0", "1"]),
        (None, ["0", "1"]),
    ],
)
def test_yolo_with_other_settings(yaml: str | None, names: list[str], tmp_path: Path) -> None:
    source = yolo_folder(tmp_path / "yolo", yaml)
    write_text(source / "list.txt", "./images/train/a.jpg\nimages/train/empty.jpg\n")
    train, val = convert_yolo(source, tmp_path / "new")
    assert (train.images, val.images) == (2, 1)
    assert [category["name"] for category in read(train.annotations)["categories"]] == names


def test_yolo_with_several_yaml_files(tmp_path: Path) -> None:
    source = yolo_folder(tmp_path / "yolo", None)
    for name in ("cats.yaml", "dogs.yml"):
        write_text(source / name, "names: [a, b]\n")
    with pytest.raises(DataError, match=r"expected data\.yaml or a single yaml file, got cats\.yaml, dogs\.yml"):
        convert_yolo(source, tmp_path / "new")


def test_yolo_without_splits(tmp_path: Path) -> None:
    write_image(tmp_path / "yolo/images/a.jpg")
    write_text(tmp_path / "yolo/labels/a.txt", "2 0.5 0.5 0.1 0.1")
    write_text(tmp_path / "yolo/classes.txt", "x\ny\nz\n")
    (written,) = convert_yolo(tmp_path / "yolo", tmp_path / "new")
    assert written.annotations.name == "annotations.json"
    assert [category["name"] for category in read(written.annotations)["categories"]] == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 0.5 0.5 20 10", r"a\.txt: line 1: .* divide pixels by the width and height"),
        ("0 0.5 nan 0.1 0.1", "coordinates from 0 to 1"),
        ("0 0.5 0.5 0.1", "got 3 numbers"),
        ("0 0.5 0.5 0.1 0.1 0.2", "got 5 numbers"),
        ("cat 0.5 0.5 0.1 0.1", "expected numbers, got 'cat"),
        ("-1 0.5 0.5 0.1 0.1", "a class number from 0"),
        ("5 0.5 0.5 0.1 0.1", "class 5 has no name among the 2"),
    ],
)
def test_yolo_labels_that_are_wrong(line: str, message: str, tmp_path: Path) -> None:
    source = yolo_folder(tmp_path / "yolo")
    write_text(source / "labels/train/a.txt", line)
    with pytest.raises(DataError, match=message):
        convert_yolo(source, tmp_path / "new")


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("train: /etc\n", "'/etc' leaves the folder"),
        ("train: images/../../x\n", "leaves the folder"),
        ("train: images/none\n", "which has no images"),
        ("train: [\n", "not YAML"),
        ("- a\n", "expected names, train and val"),
        ("names: !!python/object/apply:os.getcwd []\n", "not YAML"),
        ("names: cat\n", "expected names in data.yaml as a list, or by numbers from 0"),
        ("names: {cat: 0, dog: 1}\n", "expected names in data.yaml as a list, or by numbers from 0"),
        ("names: {-1: cat}\n", "expected names in data.yaml as a list, or by numbers from 0"),
        ("names: [cat, '']\n", "expected names in data.yaml as a list, or by numbers from 0"),
        ("names: [cat, [dog]]\n", "expected names in data.yaml as a list, or by numbers from 0"),
    ],
)
def test_yolo_settings_that_are_wrong_or_malicious(yaml: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        convert_yolo(yolo_folder(tmp_path / "yolo", yaml), tmp_path / "new")


# All formats


def test_images_are_linked_or_copied(tmp_path: Path) -> None:
    source = yolo_folder(tmp_path / "yolo")
    convert_yolo(source, tmp_path / "linked")
    convert_yolo(source, tmp_path / "copied", copy=True)
    linked, copied = (tmp_path / name / "images/images/train/a.jpg" for name in ("linked", "copied"))
    assert linked.is_symlink()
    assert not copied.is_symlink()
    assert linked.read_bytes() == copied.read_bytes() == (source / "images/train/a.jpg").read_bytes()


def test_where_the_system_makes_no_links_images_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(Path, "symlink_to", refuse)
    convert_yolo(yolo_folder(tmp_path / "yolo"), tmp_path / "new")
    assert (tmp_path / "new/images/images/train/a.jpg").is_file()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write_text(tmp_path / "new/mine.txt", "keep")
    with pytest.raises(DataError, match="already exists and is not empty"):
        convert_yolo(yolo_folder(tmp_path / "yolo"), tmp_path / "new")
    for convert in (convert_cityscapes, convert_voc, convert_yolo):
        with pytest.raises(DataError, match=r"the folder does not exist|has no folder"):
            convert(tmp_path / "nowhere", tmp_path / "other")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, new = yolo_folder(tmp_path / "yolo"), tmp_path / "new"
    assert main(["convert", "yolo", str(source), str(new), "--copy"]) == 0
    out = capsys.readouterr().out
    assert "train.json" in out
    assert f"Next: bucketrank check-data {new}" in out
    assert main(["check-data", str(new)]) == 0
    assert main(["convert", "yolo", str(source), str(new)]) == 1
    assert "give a new folder" in capsys.readouterr().err
    voc_source = voc_folder(tmp_path / "voc", a=voc_object("cat", 1, 1, 9, 9))
    assert main(["convert", "voc", str(voc_source), str(tmp_path / "v")]) == 0
    assert main(["convert", "cityscapes", str(cityscapes_folder(tmp_path / "c")), str(tmp_path / "cc")]) == 0


# Failures and links


@pytest.mark.parametrize("existing", [False, True])
def test_a_failed_conversion_leaves_nothing(existing: bool, tmp_path: Path) -> None:
    source = yolo_folder(tmp_path / "yolo")
    broken = source / "images/val/a.jpg"  # read last
    sound = broken.read_bytes()
    broken.write_bytes(b"no image")
    new = tmp_path / "deep/new"
    if existing:
        new.mkdir(parents=True)
    with pytest.raises(DataError, match="not an image"):
        convert_yolo(source, new)
    assert (list(new.iterdir()) == []) if existing else not new.parent.exists()
    broken.write_bytes(sound)
    convert_yolo(source, new)
    assert sorted(path.name for path in new.iterdir()) == ["images", "train.json", "val.json"]
    assert (new / "images/images/val/a.jpg").read_bytes() == sound, "the link leads to the image"


def test_a_killed_conversion_does_not_block_the_next(tmp_path: Path) -> None:
    source, new = yolo_folder(tmp_path / "yolo"), tmp_path / "new"
    code = (
        "import os, pathlib, sys; from bucketrank.data.convert import convert_yolo, writer\n"
        "writer.link_or_copy = lambda *_, **__: os._exit(9)\n"
        "convert_yolo(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    )
    assert subprocess.run([sys.executable, "-c", code, source, new], check=False).returncode == 9
    (leftover,) = new.iterdir()
    assert leftover.name.startswith(".converting-")
    convert_yolo(source, new)
    assert sorted(path.name for path in new.iterdir()) == ["images", "train.json", "val.json"]


def test_the_folder_of_a_conversion_that_still_runs_is_refused(tmp_path: Path) -> None:
    running = tmp_path / f"new/.converting-{os.getppid()}"
    running.mkdir(parents=True)
    with pytest.raises(DataError, match="already exists and is not empty"):
        convert_yolo(yolo_folder(tmp_path / "yolo"), tmp_path / "new")
    assert running.is_dir()


@pytest.mark.parametrize("name", ["images/train/a.jpg", "labels/train/a.txt", "data.yaml", "images", "images/train"])
def test_yolo_links_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    source, elsewhere = yolo_folder(tmp_path / "yolo"), tmp_path / "elsewhere"
    (source / name).rename(elsewhere)
    (source / name).symlink_to(elsewhere)
    with pytest.raises(DataError, match=r"is a link to a file outside .*yolo; copy the file into the folder"):
        convert_yolo(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["JPEGImages/a.jpg", "Annotations/a.xml", "ImageSets/Main/train.txt"])
def test_voc_links_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    source, elsewhere = voc_folder(tmp_path / "voc", a=""), tmp_path / "elsewhere"
    write_text(source / "ImageSets/Main/train.txt", "a\n")
    (source / name).rename(elsewhere)
    (source / name).symlink_to(elsewhere)
    with pytest.raises(DataError, match="is a link to a file outside"):
        convert_voc(source, tmp_path / "new")


@pytest.mark.parametrize("pattern", ["gtFine/train/*/*.png", "leftImg8bit/train/*/*.png"])
def test_cityscapes_links_out_of_the_folder_are_refused(pattern: str, tmp_path: Path) -> None:
    source = cityscapes_folder(tmp_path / "source")
    path = next(source.glob(pattern))
    path.rename(tmp_path / "elsewhere.png")
    path.symlink_to(tmp_path / "elsewhere.png")
    with pytest.raises(DataError, match="is a link to a file outside"):
        convert_cityscapes(source, tmp_path / "new")


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    source = yolo_folder(tmp_path / "yolo")
    (source / "images/train/a.jpg").rename(source / "stored.jpg")
    (source / "images/train/a.jpg").symlink_to("../../stored.jpg")
    train, _ = convert_yolo(source, tmp_path / "new")
    assert train.objects == 2


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999", "1e200"])
def test_a_voc_box_that_is_not_finite_is_refused(number: str, tmp_path: Path) -> None:
    """JSON has no NaN. The area of a box of 1e200 x 1e200 is infinite."""
    text = voc_object("cat", 1, 1, 4, 4).replace(">4<", f">{number}<")
    source = voc_folder(tmp_path / "source", a=text)
    with pytest.raises(
        DataError, match=r"a\.xml: line 1: expected finite numbers in an object's bndbox, got 1\.0, 1\.0, "
    ):
        convert_voc(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_control_characters_in_names_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = voc_folder(tmp_path / "source", a=voc_object("cat", 1, 1, 4, 4))
    new = tmp_path / "new\x1b[2J"
    assert main(["convert", "voc", str(source), str(new)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "new\\x1b[2J" in printed
    (new / "annotations.json").unlink()
    assert main(["convert", "voc", str(new), str(tmp_path / "other")]) == 1
    assert "new\\x1b[2J: has no folder Annotations" in capsys.readouterr().err
