"""Mosaic, mixup and copy-paste on boxes drawn by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torchvision import tv_tensors
from torchvision.transforms import v2

from bucketrank.data import CocoDataset, find_splits, train_transform, write_shapes
from bucketrank.data.coco import Item
from bucketrank.data.mixing import MixedImages, fill, make_mosaic, mix, paste
from bucketrank.training.batches import RunData
from tests.data.small_folders import sound_document, write_split
from tests.training import tiny

Window = tuple[int, int, int, int]  # left, top, right, bottom


def item(size: tuple[int, int], *boxes: Window, colour: int = 100, label: int = 1) -> Item:
    """Return a plain image with filled rectangles that are 50 brighter; their masks fill the boxes."""
    image = torch.full((3, *size), colour, dtype=torch.uint8)
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = 1
        image[:, top:bottom, left:right] = colour + 50
    corners = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return tv_tensors.Image(image), {
        "boxes": tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=size),
        "labels": torch.full((len(boxes),), label),
        "image_id": torch.tensor(label),
        "area": masks.flatten(1).sum(1).float(),
        "iscrowd": torch.zeros(len(boxes), dtype=torch.int64),
        "masks": tv_tensors.Mask(masks),
    }


def fixed(monkeypatch: pytest.MonkeyPatch, *, share: float = 0.5, offset: int = 0, chosen: float = 0.0) -> None:
    """Replace the random numbers: ``share`` of every range, windows at ``offset``, corners in order."""
    monkeypatch.setattr("bucketrank.data.mixing._uniform", lambda low, high: low + share * (high - low))
    monkeypatch.setattr(torch, "randint", lambda high, _: torch.tensor(min(offset, high - 1)))
    monkeypatch.setattr(torch, "randperm", torch.arange)
    monkeypatch.setattr(torch, "rand", lambda *size: torch.full(size, chosen))


def boxes_of(masks: Tensor) -> Tensor:
    """Return the extent of every mask."""
    rows = [(mask.any(0).nonzero(), mask.any(1).nonzero()) for mask in masks.bool()]
    return torch.tensor([[x.min(), y.min(), x.max() + 1, y.max() + 1] for x, y in rows], dtype=torch.float32)


@pytest.mark.parametrize("long", [400, 8000])
@pytest.mark.parametrize("lying", [False, True])
def test_a_strip_is_cut_before_it_is_enlarged(long: int, lying: bool) -> None:
    """Scaled as a whole, the longer strip would have 2,000 times the pixels of the canvas."""
    boxes: list[Window] = [(0, 8 * n, 4, 8 * n + 8) for n in range(long // 8)]
    size = (long, 4)
    if lying:
        boxes, size = [(top, left, bottom, right) for left, top, right, bottom in boxes], (4, long)
    enlarged: list[list[int]] = []
    resize = v2.functional.resize

    def record(image: Tensor, new: list[int], **options: Any) -> Tensor:
        enlarged.append(new)
        resized: Tensor = resize(image, new, **options)
        return resized

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2.functional, "resize", record)
        pixels, target = fill(item(size, *boxes), (64, 64), canvas=(64, 64))
    assert pixels.shape == (3, 64, 64)
    assert max(height * width for height, width in enlarged) <= 16 * 64 * 64
    assert len(target["boxes"])
    assert_close(boxes_of(target["masks"]), target["boxes"], atol=16.0, rtol=0)


def test_a_window_scales_shifts_and_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, share=1.0, offset=5)
    # The image of 20 x 40 is doubled to fit the canvas of 40 x 80; the window of 30 x 60 begins at (5, 5).
    objects = (10, 5, 20, 15), (30, 10, 40, 20), (0, 0, 2, 2)
    pixels, target = fill(item((20, 40), *objects), (30, 60), canvas=(40, 80))
    assert pixels.shape == (3, 30, 60)
    assert_close(target["boxes"], torch.tensor([[15.0, 5, 35, 25], [55, 15, 60, 30]]))  # the third is outside
    assert_close(target["area"], torch.tensor([400.0, 400.0]))
    assert_close(boxes_of(target["masks"]), target["boxes"])
    assert int(pixels[0, 10, 20]) == 150


def test_an_object_that_is_mostly_outside_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, share=1.0)
    # 2 and 1 of the 20 columns are inside: a tenth is enough, a twentieth is not.
    kept = fill(item((20, 40), (18, 0, 38, 10), (19, 0, 39, 10)), (20, 20), canvas=(20, 40))[1]
    assert_close(kept["boxes"], torch.tensor([[18.0, 0, 20, 10]]))


def test_a_mosaic_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, share=0.5)  # the images meet in the middle; scale 0.75, the windows begin at (0, 0)
    items = [item((40, 80), (8, 8, 24, 16), colour=20 * number, label=number) for number in range(1, 5)]
    image, target = make_mosaic(items)
    assert image.shape == (3, 40, 80)
    one = torch.tensor([6.0, 6, 18, 12])
    shifts = torch.tensor([[0, 0, 0, 0], [40, 0, 40, 0], [0, 20, 0, 20], [40, 20, 40, 20]])
    assert_close(target["boxes"].as_subclass(Tensor), one + shifts)
    assert target["labels"].tolist() == [1, 2, 3, 4]
    assert int(target["image_id"]) == 1
    assert_close(boxes_of(target["masks"]), target["boxes"].as_subclass(Tensor))
    for number, (y, x) in enumerate([(1, 1), (1, 70), (30, 1), (30, 70)], start=1):
        assert int(image[0, y, x]) == 20 * number
    assert target["boxes"].canvas_size == (40, 80)


def test_a_mixture_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, share=0.0)  # 0.4 of the first image
    first, second = item((40, 80), (0, 0, 8, 8), colour=100), item((20, 40), (20, 10, 30, 18), colour=50, label=2)
    image, target = mix(first, second)
    assert_close(target["boxes"].as_subclass(Tensor), torch.tensor([[0.0, 0, 8, 8], [40, 20, 60, 36]]))
    assert target["labels"].tolist() == [1, 2]
    assert int(image[0, 10, 10]) == 70  # 0.4 * 100 + 0.6 * 50
    assert int(image[0, 2, 2]) == 90  # 0.4 * 150 + 0.6 * 50
    assert int(image[0, 28, 50]) == 100  # 0.4 * 100 + 0.6 * 100


def test_pasted_objects_hide_those_below(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, chosen=0.0)  # every object is pasted
    below = item((40, 80), (0, 0, 20, 20), (30, 0, 50, 20), (60, 0, 70, 10))
    image, target = paste(below, item((40, 80), (10, 0, 30, 20), (30, 0, 49, 20), colour=10, label=2))
    expected = [[0.0, 0, 10, 20], [60, 0, 70, 10], [10, 0, 30, 20], [30, 0, 49, 20]]  # 1 of 20 columns was left
    assert_close(target["boxes"].as_subclass(Tensor), torch.tensor(expected))
    assert target["labels"].tolist() == [1, 1, 2, 2]
    assert_close(boxes_of(target["masks"]), target["boxes"].as_subclass(Tensor))
    assert target["masks"].sum(0).max() == 1
    assert (int(image[0, 5, 5]), int(image[0, 5, 15]), int(image[0, 30, 30])) == (150, 60, 100)
    fixed(monkeypatch, chosen=1.0)  # no object is pasted
    image, target = paste(below, item((40, 80), (10, 0, 30, 20), colour=10))
    assert_close(image.as_subclass(Tensor), below[0].as_subclass(Tensor))
    assert_close(target["boxes"].as_subclass(Tensor), below[1]["boxes"].as_subclass(Tensor))


@pytest.mark.parametrize("masks", [False, True])
def test_no_box_is_outside_and_masks_agree(masks: bool, shapes: Path) -> None:
    split = find_splits(shapes).train
    assert split is not None
    data = MixedImages(CocoDataset(split, masks=masks), mosaic=0.7, mixup=0.5, copy_paste=0.7 if masks else 0.0)
    torch.manual_seed(0)
    counts = []
    for index in [*range(len(data))] * 3:
        image, target = data[index]
        height, width = data.images.sizes[index]
        assert image.shape == (3, height, width)
        boxes = target["boxes"].as_subclass(Tensor)
        assert (boxes >= 0).all()
        assert (boxes <= torch.tensor([width, height, width, height])).all()
        assert (boxes[:, 2:] - boxes[:, :2] > 0).all()
        assert {len(target[name]) for name in target if name not in ("image_id",)} == {len(boxes)}
        if masks and len(boxes):
            extent = boxes_of(target["masks"])
            assert (extent[:, :2] >= boxes[:, :2] - 1).all()
            assert (extent[:, 2:] <= boxes[:, 2:] + 1).all()
        counts.append(len(boxes))
    assert len(set(counts)) > 5


def test_images_without_objects_and_thin_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, empty = item((40, 80), (0, 0, 20, 20)), item((30, 30))
    for mixed in (paste(plain, empty), mix(empty, plain), paste(empty, plain), make_mosaic([empty] * 4)):
        assert mixed[1]["boxes"].shape[1] == 4
    assert make_mosaic([empty] * 4)[1]["boxes"].shape == (0, 4)
    data = CocoDataset(write_split(tmp_path, sound_document()), masks=True, transform=train_transform(flip=0.0))
    monkeypatch.setattr(data, "read", lambda _: item((3, 80), (0, 0, 20, 3)))
    image, _ = MixedImages(data, mosaic=1.0, mixup=1.0, copy_paste=1.0)[0]
    assert image.shape == (3, 3, 80)


def test_copy_paste_needs_masks(shapes: Path, tmp_path: Path) -> None:
    split = find_splits(shapes).train
    assert split is not None
    with pytest.raises(ValueError, match="expected images with masks for copy_paste"):
        MixedImages(CocoDataset(split), copy_paste=0.5)
    document = sound_document()
    del document["annotations"][0]["segmentation"]
    write_split(tmp_path, document)
    write_split(tmp_path, document, name="val.json")
    with pytest.raises(ValueError, match="annotation 1: has no segmentation; models with masks and copy-paste need"):
        RunData(find_splits(tmp_path), tiny.recipe("--data.copy_paste 0.5"), masks=False)


def loaded(folder: Path, flags: str, **options: Any) -> list[Any]:
    data = RunData(find_splits(folder), tiny.recipe(flags), masks=False)
    return [target for _, targets in data.train_loader(epoch=0, **options) for target in targets]


def test_the_last_epochs_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_shapes(tmp_path / "shapes", train=4, val=1, size=64)
    mixing = "--data.flip 0 --data.mosaic 1 --data.copy_paste 1 --data.close_augmentations 2"
    plain = {int(t["image_id"]): t["boxes"] for t in loaded(folder, "--data.flip 0")}
    for last in (False, True):
        targets = loaded(folder, mixing, last_epochs=last)
        assert all("masks" not in target for target in targets), "the detector does not ask for masks"
        same = [torch.equal(target["boxes"], plain[int(target["image_id"])]) for target in targets]
        assert all(same) if last else not any(same)

    closed: list[bool] = []
    usual = RunData.train_loader

    def record(data: RunData, *, last_epochs: bool, **options: Any) -> Any:
        closed.append(last_epochs)
        return usual(data, last_epochs=last_epochs, **options)

    monkeypatch.setattr(RunData, "train_loader", record)
    for epochs, flags in ((3, "--schedule.epochs 3"), (4, "--schedule.epochs 9 --schedule.max_steps 4")):
        closed.clear()
        tiny.run(tmp_path / f"run-{epochs}", folder, f"{mixing} {flags} --schedule.milestones 1")
        assert closed == [False] * (epochs - 2) + [True] * 2


def test_workers_mix_the_same_images(tmp_path: Path) -> None:
    folder = write_shapes(tmp_path / "shapes", train=6, val=1, size=64)
    flags = "--data.mosaic 0.5 --data.mixup 0.5 --data.copy_paste 0.5"
    one, two = (loaded(folder, f"{flags} --data.workers {workers}") for workers in (0, 2))
    for mine, theirs in zip(one, two, strict=True):
        for name in mine:
            assert_close(mine[name], theirs[name], rtol=0, atol=0)
