"""Layouts of a folder, the division of a single file, and file names."""

from __future__ import annotations

import json
import os.path
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrank.data import Split, Splits, find_splits
from bucketrank.data.annotations import file_name, held_out, path_inside
from bucketrank.data.layouts import find_split
from bucketrank.errors import DataError
from tests.data.small_folders import sound_document, write_split
from tests.shared_data import shared


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}", encoding="utf-8")


@pytest.mark.parametrize(
    ("train", "val", "train_images", "val_images"),
    [
        ("train.json", "val.json", "images", "images"),
        ("annotations/instances_train2017.json", "annotations/instances_val2017.json", "train2017", "val2017"),
        ("annotations/lvis_v1_train.json", "annotations/lvis_v1_val.json", ".", "."),
        ("train/_annotations.coco.json", "valid/_annotations.coco.json", "train", "valid"),
    ],
)
def test_layouts(train: str, val: str, train_images: str, val_images: str, tmp_path: Path) -> None:
    touch(tmp_path, train, val, f"{train_images}/a.jpg", f"{val_images}/b.jpg")
    expected = Splits(Split(tmp_path / train, tmp_path / train_images), Split(tmp_path / val, tmp_path / val_images))
    assert find_splits(tmp_path) == expected
    (tmp_path / train).unlink()
    assert find_splits(str(tmp_path)) == Splits(None, expected.val), "evaluation needs no training data"


@pytest.mark.parametrize(
    ("test", "val", "images"),
    [
        ("test.json", "val.json", "images"),
        ("annotations/instances_test2017.json", "annotations/instances_val2017.json", "test2017"),
        ("annotations/lvis_v1_test.json", "annotations/lvis_v1_val.json", "."),
        ("test/_annotations.coco.json", "valid/_annotations.coco.json", "test"),
    ],
)
def test_a_test_split_is_found_by_name_only(test: str, val: str, images: str, tmp_path: Path) -> None:
    touch(tmp_path, val, test, f"{images}/a.jpg")
    unannotated = "expected a split 'test' with annotations, got images without annotations; choose val"
    with pytest.raises(DataError, match=unannotated):
        find_split(tmp_path, "test")
    (tmp_path / test).write_text(json.dumps(sound_document()), encoding="utf-8")
    assert find_split(tmp_path, "test", holdout=0.5) == Split(tmp_path / test, tmp_path / images)
    (tmp_path / val).unlink()
    assert find_split(tmp_path, "test") == Split(tmp_path / test, tmp_path / images)
    if test != "test.json":  # a single file, which is divided
        with pytest.raises(DataError, match="expected images for training or validation, got only test"):
            find_splits(tmp_path)


def test_a_missing_split_is_named_with_those_that_exist(tmp_path: Path) -> None:
    document = sound_document()
    whole = write_split(tmp_path, document)
    with pytest.raises(DataError, match="expected a split 'test' with annotations, got none; choose train or val"):
        find_split(tmp_path, "test")
    assert find_split(tmp_path, "val") == replace(whole, part="val")
    assert find_split(tmp_path, "train", holdout=0.5).tuning == "train"
    write_split(tmp_path, document, name="test.json")
    assert find_splits(tmp_path).val == replace(whole, part="val"), "the test images are not for training"
    assert find_split(tmp_path, "test").read() == document
    (tmp_path / "train.json").unlink()
    assert find_split(tmp_path, "test").read() == document
    with pytest.raises(DataError, match="got only test; name the folders or files train and val"):
        find_splits(tmp_path)
    write_split(tmp_path, {**document, "annotations": []}, name="val.json")
    with pytest.raises(DataError, match="expected a split 'train' with annotations, got none; choose val or test"):
        find_split(tmp_path, "train")


def test_a_folder_of_two_layouts(tmp_path: Path) -> None:
    touch(tmp_path, "annotations/instances_val2017.json", "annotations/lvis_v1_val.json", "val2017/a.jpg")
    with pytest.raises(
        DataError, match=r"fits several layouts:\n  coco: .*\n  lvis: .*\nChoose one: --layout coco, or"
    ):
        find_splits(tmp_path)
    chosen = {layout: find_splits(tmp_path, layout=layout).val for layout in ("coco", "lvis")}
    assert chosen["coco"] == Split(tmp_path / "annotations/instances_val2017.json", tmp_path / "val2017")
    assert chosen["lvis"] == Split(tmp_path / "annotations/lvis_v1_val.json", tmp_path)
    with pytest.raises(DataError, match="no annotations found") as raised:
        find_splits(tmp_path, layout="own")
    assert "lvis" not in str(raised.value)
    with pytest.raises(DataError, match="unknown layout 'pascal'; choose one of own, coco, lvis, roboflow, yolo, voc"):
        find_splits(tmp_path, layout="pascal")


def test_images_may_lie_beside_the_file(tmp_path: Path) -> None:
    touch(tmp_path, "train.json", "val.json")
    assert find_splits(tmp_path).train == Split(tmp_path / "train.json", tmp_path)


@pytest.mark.parametrize("name", ["train.json", "labels.json"])
def test_a_single_file_is_divided(name: str, tmp_path: Path) -> None:
    document = sound_document()
    document["images"] = [{"id": n, "file_name": f"{n}.png", "width": 4, "height": 4} for n in range(40)]
    document["annotations"] = [{"id": n, "image_id": n, "category_id": 2, "bbox": [0, 0, 1, 1]} for n in range(40)]
    write_split(tmp_path, document, name=name)
    train, val = find_splits(tmp_path, seed=3)
    assert train is not None
    assert val is not None
    parts = [{image["id"] for image in split.read()["images"]} for split in (train, val)]
    assert [len(part) for part in parts] == [36, 4]
    assert parts[0] | parts[1] == set(range(40))
    assert {each["image_id"] for each in val.read()["annotations"]} == parts[1]
    again = find_splits(tmp_path, seed=4).val
    assert again is not None
    assert {image["id"] for image in again.read()["images"]} != parts[1]


@given(st.sets(st.integers(0, 10**6), min_size=2, max_size=60), st.integers(0, 5))
def test_the_division_depends_on_the_ids_alone(ids: set[int], seed: int) -> None:
    kept = held_out(sorted(ids), seed=seed)
    assert kept == held_out(sorted(ids, reverse=True), seed=seed)
    assert 1 <= len(kept) < len(ids)
    assert len(kept) == max(1, round(len(ids) / 10))


def test_one_image_is_for_training() -> None:
    assert held_out([1], seed=0) == set()


def test_a_folder_without_annotations_lists_the_expected_files(tmp_path: Path) -> None:
    touch(tmp_path, "one.json", "two.json")
    with pytest.raises(DataError) as raised:
        find_splits(tmp_path)
    for name in ("train.json", "instances_train2017.json", "lvis_v1_train.json", "_annotations.coco.json", "one.json"):
        assert name in str(raised.value)
    with pytest.raises(DataError, match="the folder does not exist"):
        find_splits(tmp_path / "nowhere")


def test_a_file_without_images_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no images"):
        write_split(tmp_path, json.dumps({"annotations": []})).read()


def test_lvis_names_its_files_by_url() -> None:
    assert file_name({"coco_url": "http://images.cocodataset.org/train2017/000000391895.jpg"}) == (
        "train2017/000000391895.jpg"
    )
    assert file_name({"file_name": "a.jpg", "coco_url": "http://x/y/z.jpg"}) == "a.jpg"


@given(st.lists(st.sampled_from(["a", "b.png", "..", "."]), min_size=1, max_size=6))
def test_no_name_leaves_the_folder(parts: list[str]) -> None:
    name = "/".join(parts)
    root = Path("/data/set/images")
    try:
        path = root / path_inside(name)
    except DataError:
        return
    plain = Path(os.path.normpath(path))
    assert plain.is_relative_to(root)
    assert plain != root


@pytest.mark.parametrize("name", ["", ".", "..", "/a", "\\a", "a/..", "C:a.png", "//host/share/a.png", "a\0b"])
def test_names_that_leave_the_folder(name: str) -> None:
    with pytest.raises(DataError, match="leaves the folder"):
        path_inside(name)


def test_shared_folders_are_found() -> None:
    for name in ("bccd", "nuclei", "coco_by"):
        train, val = find_splits(shared(f"data/{name}"))
        assert train is not None
        assert val is not None
        assert val.images.name == "images"


def test_a_holdout_divides_the_training_images_once_more(tmp_path: Path) -> None:
    document = sound_document()
    document["images"] = [{**document["images"][0], "id": number} for number in range(40)]
    document["annotations"] = [{**document["annotations"][0], "id": n + 1, "image_id": n} for n in range(40)]
    whole = write_split(tmp_path, document)
    single_file = Splits(replace(whole, part="train"), replace(whole, part="val"))
    kept_for_validation = {image["id"] for image in single_file.val.read()["images"]}  # type: ignore[union-attr]
    divided = single_file.with_holdout(0.25)
    parts = [split for split in divided if split is not None]
    train, tuning = ({image["id"] for image in split.read()["images"]} for split in parts)
    assert (len(train), len(tuning)) == (27, 9)
    assert not train & tuning
    assert not (train | tuning) & kept_for_validation
    assert single_file.with_holdout(None) is single_file
    for split in parts:
        content = split.read()
        assert {each["image_id"] for each in content["annotations"]} == {image["id"] for image in content["images"]}
