"""A new division of a data set, class by class."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrank.cli import main
from bucketrank.data import check, find_splits
from bucketrank.data.checks import Content, check_pair
from bucketrank.data.split import resplit, stratified_holdout
from bucketrank.errors import DataError
from tests.data.small_folders import sound_document, write_image, write_split

CLASSES = ["cat", "dog", "bird"]


def folder_of(folder: Path, **labels: list[list[str]]) -> Path:
    """Write a data set; each split lists the classes of the objects in each of its images."""
    categories = [{"id": 10 + number, "name": name} for number, name in enumerate(CLASSES)]
    for split, images in labels.items():
        document: dict[str, Any] = {"images": [], "annotations": [], "categories": categories}
        for number, names in enumerate(images, start=1):
            file = f"{split}-{number}.png"
            write_image(folder / "images" / file)
            document["images"].append({"id": number, "file_name": file, "width": 40, "height": 30})
            for name in names:
                entry = {"id": len(document["annotations"]) + 1, "image_id": number, "bbox": [number, 2, 8, 9]}
                document["annotations"].append(entry | {"category_id": 10 + CLASSES.index(name)})
        (folder / f"{split}.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def objects(path: Path) -> Counter[tuple[str, str, float]]:
    """Return how often each file, class and left edge of a box occurs."""
    document = json.loads(path.read_text(encoding="utf-8"))
    files = {image["id"]: image["file_name"] for image in document["images"]}
    names = {category["id"]: category["name"] for category in document["categories"]}
    return Counter(
        (files[entry["image_id"]].removeprefix("images/"), names[entry["category_id"]], entry["bbox"][0])
        for entry in document["annotations"]
    )


def test_every_class_keeps_its_share(tmp_path: Path) -> None:
    train = [["cat"]] * 6 + [["cat", "dog"]] * 3
    source = folder_of(tmp_path / "old", train=train, val=[["bird"], ["bird", "bird"], ["dog"]])
    written = resplit(source, tmp_path / "new", val=1 / 3)
    assert [(each.images, each.annotations.name) for each in written] == [(8, "train.json"), (4, "val.json")]
    before = objects(source / "train.json") + objects(source / "val.json")
    parts = [objects(tmp_path / "new" / name) for name in ("train.json", "val.json")]
    assert parts[0] + parts[1] == before, "nothing is lost, and files with equal ids stay apart"
    assert {name for _, name, _ in parts[0]} == {name for _, name, _ in parts[1]} == set(CLASSES)
    for split in find_splits(tmp_path / "new"):
        assert split is not None
        assert check(split) == []


def test_masks_crowds_and_empty_images_are_kept(tmp_path: Path) -> None:
    write_split(tmp_path / "old", sound_document(), name="all.json")
    resplit(tmp_path / "old", tmp_path / "new", val=0.5)
    documents = [json.loads((tmp_path / "new" / name).read_text()) for name in ("train.json", "val.json")]
    assert sorted(len(document["annotations"]) for document in documents) == [0, 3]
    entries = [entry for document in documents for entry in document["annotations"]]
    assert [entry["iscrowd"] for entry in entries] == [0, 0, 1]
    assert entries[2]["segmentation"] == sound_document()["annotations"][2]["segmentation"]
    assert [entry["area"] for entry in entries] == [200, 48, 30], "without an area, that of the box"


def test_a_converted_data_set_of_links_can_be_divided(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "old", train=[["cat"]] * 4, val=[["dog"]] * 4)
    resplit(source, tmp_path / "linked", val=0.5)
    assert any(path.is_symlink() for path in (tmp_path / "linked").rglob("*.png"))
    resplit(tmp_path / "linked", tmp_path / "again", val=0.25)
    for split in find_splits(tmp_path / "again"):
        assert split is not None
        assert check(split) == []


@given(
    st.lists(st.lists(st.sampled_from("abcd"), max_size=3), min_size=2, max_size=40),
    st.floats(0.05, 0.95),
    st.integers(0, 3),
)
def test_shares_hold_for_any_labels(images: list[list[str]], share: float, seed: int) -> None:
    labels = dict(enumerate(images))
    val = stratified_holdout(labels, share=share, seed=seed)
    assert val <= set(labels)
    assert 0 < len(val) < len(labels)
    assert val == stratified_holdout(labels, share=share, seed=seed)
    counts = Counter(label for own in images for label in set(own))
    if counts:
        rarest = min(counts, key=lambda label: (counts[label], label))
        held_out = sum(rarest in labels[image] for image in val)
        assert abs(held_out - share * counts[rarest]) <= 1, "the class that is divided first"


@pytest.mark.parametrize(("per_class", "share"), [(4, 0.1), (2, 0.2), (1, 0.3), (2, 0.8)])
def test_many_rare_classes_leave_no_part_too_small(per_class: int, share: float) -> None:
    labels = {image: [str(image // per_class)] for image in range(20 * per_class)}
    val = stratified_holdout(labels, share=share, seed=0)
    assert abs(len(val) - share * len(labels)) <= 1
    counts = Counter(labels[image][0] for image in val)
    assert max(counts.values()) - min(counts[label] for (label,) in labels.values()) <= 1, "spread over the classes"


def test_other_seeds_divide_otherwise() -> None:
    labels = {image: ["cat"] for image in range(30)}
    divisions = {frozenset(stratified_holdout(labels, share=0.5, seed=seed)) for seed in range(5)}
    assert len(divisions) == 5
    assert {len(division) for division in divisions} == {15}


def test_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path / "old", train=[["cat"]], val=[["dog"]])
    with pytest.raises(DataError, match="val: expected a share above 0 and below 1, got 1"):
        resplit(source, tmp_path / "new", val=1.0)
    single = folder_of(tmp_path / "single", train=[["cat"]], val=[])
    (single / "val.json").unlink()
    with pytest.raises(DataError, match="expected at least two images to split, got 1"):
        resplit(single, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert main(["split", str(source), str(source)]) == 1
    assert "already exists and is not empty" in capsys.readouterr().err
    assert main(["split", str(tmp_path / "nowhere"), str(tmp_path / "new")]) == 1
    assert "the folder does not exist" in capsys.readouterr().err
    document = json.loads((source / "train.json").read_text())
    document["categories"][0]["frequency"] = "r"
    (source / "train.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="LVIS has its own splits"):
        resplit(source, tmp_path / "new")
    document["annotations"][0]["bbox"] = "none"
    (source / "train.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="bbox"):
        resplit(source, tmp_path / "new")


def test_command_removes_the_warning_of_check_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path / "old", train=[["cat"]] * 4, val=[["dog"]] * 4)
    assert main(["check-data", str(source)]) == 0
    assert "bucketrank split" in capsys.readouterr().out.replace("\n", " ")
    assert main(["split", str(source), str(tmp_path / "new"), "--val", "0.5", "--copy"]) == 0
    assert not any(path.is_symlink() for path in (tmp_path / "new").rglob("*.png"))
    assert main(["check-data", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert "0 errors, 1 warning" in out
    assert "unseen-classes" not in out
    assert "without any object: bird" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--val", "2"], "split: --val: expected a share above 0 and below 1, got 2"),
        (["--val", "nan"], "split: --val: expected a share above 0 and below 1, got nan"),
        (["--layout", "pascal"], "split: --layout: expected one of own, coco, lvis, roboflow, yolo, voc, got 'pascal'"),
    ],
)
def test_wrong_usage_exits_with_2(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_split(tmp_path, sound_document())
    assert main(["split", str(tmp_path), str(tmp_path / "new"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_new_split_escapes_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path, sound_document())
    assert main(["split", str(tmp_path), str(tmp_path / "new\x1b[2J"), "--val", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "new\\x1b[2J" in printed


def test_an_image_in_both_parts_counts_once(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "old", train=[["cat"]] * 6 + [["dog"]] * 4)
    document = json.loads((source / "train.json").read_text())
    last = document["images"][-1]["id"]
    again = {
        **document,
        "images": document["images"][-1:],
        "annotations": [entry for entry in document["annotations"] if entry["image_id"] == last],
    }
    (source / "val.json").write_text(json.dumps(again))
    written = resplit(source, tmp_path / "new", val=0.3)
    assert [each.images for each in written] == [7, 3]
    problems = check_pair(*(Content.of(split) for split in find_splits(tmp_path / "new") if split is not None))
    assert [problem.code for problem in problems] == ["unused-classes"], (
        "there is no bird, and no image is in both parts"
    )
    again["annotations"][0]["bbox"][0] += 5
    (source / "val.json").write_text(json.dumps(again))
    with pytest.raises(DataError, match=r"train-10.png: expected the same objects in .*train.json and .*val.json"):
        resplit(source, tmp_path / "other")
