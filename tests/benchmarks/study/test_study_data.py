"""Data sets with many empty images, and with one class of several."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.__main__ import main
from benchmarks.study.data import add_empty_images, find_empty_crop, keep_one_class
from bucketrank.data import find_splits
from bucketrank.data.images import read_image
from bucketrank.errors import DataError

SIZE = (144, 96)
BOX = [0.0, 0.0, 40.0, 30.0]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four training images and two for validation: blue, with a red object in the corner and a class id each."""
    folder = tmp_path / "source"
    (folder / "images").mkdir(parents=True)
    for part, count in (("train", 4), ("val", 2)):
        images, annotations = [], []
        for number in range(1, count + 1):
            name = f"{part}{number}.png"
            pixels = np.zeros((SIZE[1], SIZE[0], 3), dtype=np.uint8)
            pixels[..., 2] = 200
            pixels[:30, :40] = (255, 0, 0)
            Image.fromarray(pixels).save(folder / "images" / name)
            images.append({"id": number, "file_name": name, "width": SIZE[0], "height": SIZE[1]})
            kind = 1 + number % 2
            entry = {"id": number, "image_id": number, "category_id": kind, "bbox": BOX, "area": 1200.0, "iscrowd": 0}
            annotations.append(entry)
        categories = [{"id": 1, "name": "cell"}, {"id": 2, "name": "bead"}]
        document = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"{part}.json").write_text(json.dumps(document))
    return folder


def read(folder: Path, part: str) -> dict[str, list[dict[str, object]]]:
    document: dict[str, list[dict[str, object]]] = json.loads((folder / f"{part}.json").read_text())
    return document


@pytest.mark.parametrize(("share", "empty"), [(0.0, 0), (0.5, 4), (0.9, 36)])
def test_a_share_of_the_training_images_is_empty(source: Path, tmp_path: Path, share: float, empty: int) -> None:
    folder = tmp_path / "new"
    train, val = add_empty_images(source, folder, share=share)
    assert (train.images, train.objects) == (4 + empty, 4)
    assert (val.images, val.objects) == (2, 2)
    split = find_splits(folder).train
    assert split is not None
    document = split.read()
    occupied = {entry["image_id"] for entry in document["annotations"]}
    crops = [image for image in document["images"] if image["id"] not in occupied]
    assert len(crops) == empty
    for image in crops:
        pixels = read_image(split.image_path(image))
        assert pixels.shape == (SIZE[1], SIZE[0], 3)
        assert pixels[..., 0].max() < 40, "no red object, not even partly"


def test_the_seed_decides_the_crops(source: Path, tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        add_empty_images(source, tmp_path / name, share=0.5, seed=seed)
    one, two, three = (
        [find_empty_crop(SIZE, [BOX], np.random.default_rng(seed)) for seed in seeds]
        for seeds in ((0, 1), (0, 1), (2, 3))
    )
    assert one == two
    assert one != three
    files = [(tmp_path / name / "images/empty-crops/5.jpg").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]


def test_images_without_objects_count(source: Path, tmp_path: Path) -> None:
    document = read(source, "train")
    document["annotations"] = document["annotations"][:1]
    (source / "train.json").write_text(json.dumps(document))
    train, _ = add_empty_images(source, tmp_path / "new", share=0.8)
    assert (train.images, train.objects) == (5, 1), "three of the four images were empty, so one is added"


def test_an_image_full_of_objects_has_no_room(source: Path, tmp_path: Path) -> None:
    document = read(source, "train")
    for entry in document["annotations"]:
        entry["bbox"] = [0.0, 0.0, *map(float, SIZE)]
    (source / "train.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="expected images with room for a crop without objects"):
        add_empty_images(source, tmp_path / "new", share=0.5)
    assert not (tmp_path / "new").exists()


def test_crops_keep_away_from_every_box() -> None:
    random = np.random.default_rng(0)
    boxes = [BOX, [100.0, 60.0, 30.0, 20.0]]
    found = [find_empty_crop(SIZE, boxes, random) for _ in range(50)]
    assert any(found)
    for crop in filter(None, found):
        x1, y1, x2, y2 = crop
        assert 0 <= x1 < x2 <= SIZE[0]
        assert 0 <= y1 < y2 <= SIZE[1]
        assert min(x2 - x1, y2 - y1) >= 32
        for x, y, width, height in boxes:
            assert x >= x2 or x + width <= x1 or y >= y2 or y + height <= y1
    assert find_empty_crop((20, 90), [], random) is None, "smaller than a crop"


def test_one_class_is_kept(source: Path, tmp_path: Path) -> None:
    train, val = keep_one_class(source, tmp_path / "new", name="bead")
    assert (train.images, train.objects, val.images, val.objects) == (4, 2, 2, 1)
    document = read(tmp_path / "new", "train")
    assert document["categories"] == [{"id": 2, "name": "bead"}]
    assert {entry["category_id"] for entry in document["annotations"]} == {2}


def test_commands(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "empty", str(source), str(tmp_path / "a"), "--share", "0.5"]) == 0
    assert "train.json" in capsys.readouterr().out
    assert main(["data", "one-class", str(source), str(tmp_path / "b"), "--name", "cell"]) == 0
    capsys.readouterr()
    for words, message in (
        (["empty", str(source), str(tmp_path / "c"), "--share", "1"], "--share: expected a share from 0 to below 1"),
        (["one-class", str(source), str(tmp_path / "c"), "--name", "dog"], "--name: expected one of cell, bead, got"),
    ):
        assert main(["data", *words]) == 1
        assert message in capsys.readouterr().err
