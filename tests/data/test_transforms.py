"""Transforms change objects together with their image."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torchvision import tv_tensors

from bucketrank.data import CocoDataset, eval_transform, train_transform
from bucketrank.data.transforms import AUGMENTATIONS
from bucketrank.settings.choices import Augmentation
from tests.data.small_folders import sound_document, write_split


def item(height: int = 700, width: int = 900, objects: int = 30) -> tuple[Any, dict[str, Any]]:
    """Return an image with rectangles, whose masks fill their boxes and whose labels number them."""
    generator = torch.Generator().manual_seed(3)
    corners = torch.rand(objects, 2, generator=generator) * torch.tensor([width - 130, height - 130])
    sides = 20 + torch.rand(objects, 2, generator=generator) * 100
    boxes = torch.cat([corners, corners + sides], 1).round()
    masks = torch.zeros(objects, height, width, dtype=torch.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
        mask[y1:y2, x1:x2] = 1
    return tv_tensors.Image(torch.zeros(3, height, width, dtype=torch.uint8)), {
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width)),
        "labels": torch.arange(1, objects + 1),
        "masks": tv_tensors.Mask(masks),
        "area": torch.arange(objects, dtype=torch.float32),
        "iscrowd": torch.zeros(objects, dtype=torch.int64),
        "image_id": torch.tensor(7),
    }


def boxes_of(masks: Tensor) -> Tensor:
    boxes = []
    for mask in masks:
        y, x = mask.nonzero(as_tuple=True)
        boxes.append([x.min(), y.min(), x.max() + 1, y.max() + 1])
    return torch.tensor(boxes, dtype=torch.float32)


def test_evaluation_only_scales_the_pixels(tmp_path: Path) -> None:
    data = CocoDataset(write_split(tmp_path, sound_document()), transform=eval_transform())
    image, target = data[0]
    assert type(image) is type(target["boxes"]) is Tensor
    assert image.dtype == torch.float32
    assert 0 <= image.min() < image.max() <= 1
    assert_close(target["boxes"], torch.tensor([[4.0, 5, 14, 25], [20, 3, 28, 9]]))


def test_flip(tmp_path: Path) -> None:
    data = CocoDataset(write_split(tmp_path, sound_document()), masks=True)
    plain, _ = eval_transform()(*data[0])
    image, target = train_transform(flip=1.0)(*data[0])
    assert_close(image, plain.flip(-1))
    assert_close(target["boxes"], torch.tensor([[26.0, 5, 36, 25], [12, 3, 20, 9]]))
    assert_close(boxes_of(target["masks"])[0], target["boxes"][0])
    image, _ = train_transform(flip=0.0)(*data[0])
    assert_close(image, plain)


def test_jitter_moves_nothing() -> None:
    torch.manual_seed(0)
    image, target = item()
    image = tv_tensors.Image(torch.tensor([60, 90, 200], dtype=torch.uint8)[:, None, None].expand(image.shape))
    drawn = [train_transform(flip=0.0, jitter=True)(image, target) for _ in range(3)]
    assert max((changed - image / 255).abs().max() for changed, _ in drawn) > 0.1
    moved = drawn[0][1]
    assert_close(moved["boxes"], target["boxes"].as_subclass(Tensor))


def test_an_empty_image_stays_empty(tmp_path: Path) -> None:
    data = CocoDataset(write_split(tmp_path, sound_document()), masks=True)
    _, target = train_transform(crop=True, jitter=True)(*data[1])
    assert target["boxes"].shape == (0, 4)
    assert len(target["labels"]) == len(target["masks"]) == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_crop_keeps_boxes_labels_and_masks_together(seed: int) -> None:
    torch.manual_seed(seed)
    image, target = train_transform(crop=True)(*item())
    height, width = image.shape[1:]
    assert (height, width) == (700, 900) or (384 <= height <= 600 and 384 <= width <= 600)
    count = len(target["boxes"])
    assert {name: len(target[name]) for name in ("labels", "masks", "area", "iscrowd")} == dict.fromkeys(
        ("labels", "masks", "area", "iscrowd"), count
    )
    assert_close(target["area"], target["labels"].float() - 1, msg="each object keeps its own area")
    assert target["masks"].shape[1:] == (height, width)
    assert target["image_id"] == 7
    boxes = target["boxes"]
    assert ((boxes[:, 2:] - boxes[:, :2]) >= 1).all()
    assert (boxes >= 0).all()
    assert (boxes[:, [0, 2]] <= width).all()
    assert (boxes[:, [1, 3]] <= height).all()
    wide = ((boxes[:, 2:] - boxes[:, :2]) > 4).all(1)  # masks have whole pixels
    assert_close(boxes_of(target["masks"][wide]), boxes[wide], atol=1.5, rtol=0.0)


def test_half_of_the_images_are_cropped() -> None:
    torch.manual_seed(1)
    transform = train_transform(crop=True)
    cropped = sum(transform(*item(objects=2))[0].shape[1:] != (700, 900) for _ in range(40))
    assert 10 <= cropped <= 30


def test_a_window_is_limited_to_a_small_image() -> None:
    torch.manual_seed(0)
    for _ in range(4):  # the short side becomes at least 400, so a window of 384 always fits
        image, _ = train_transform(crop=True)(*item(200, 300, objects=1))
        assert image.shape[1:] == (200, 300) or min(image.shape[1:]) >= 384


@pytest.mark.parametrize("size", [(1, 30_000), (30_000, 1), (2, 3000)])
def test_the_crop_keeps_a_pixel_of_a_thin_image(size: tuple[int, int]) -> None:
    height, width = size
    torch.manual_seed(0)
    for _ in range(8):  # half of the images are cropped
        image, target = item(height, width, objects=0)
        cropped, _ = train_transform(crop=True)(image, target)
        assert min(cropped.shape[-2:]) >= 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("size", [(300, 2), (1, 40), (4, 90)])
def test_augmentations_of_thin_images(name: Augmentation, size: tuple[int, int]) -> None:
    transform = train_transform(flip=0.0, augment=[name])
    for seed in range(30):
        torch.manual_seed(seed)
        image, target = transform(*item(*size, objects=1))
        assert min(image.shape[-2:]) >= 1
        assert len(target["labels"]) == len(target["boxes"])


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("objects", [0, 30])
def test_augmentations_keep_objects_and_image_together(name: Augmentation, objects: int) -> None:
    transform = train_transform(flip=0.0, augment=[name])
    shapes, moved = set(), 0
    for seed in range(12):
        torch.manual_seed(seed)
        image, target = transform(*item(height=140, width=180, objects=objects))
        height, width = image.shape[-2:]
        shapes.add((height, width))
        count = len(target["boxes"])
        assert len(target["labels"]) == len(target["masks"]) == len(target["area"]) == count
        assert target["masks"].shape[-2:] == (height, width)
        if count:
            low, high = target["boxes"][:, :2], target["boxes"][:, 2:]
            assert (low >= 0).all()
            assert (high <= torch.tensor([width, height])).all()
            assert (high - low >= 1).all()
        moved += count != objects or not torch.equal(target["boxes"], item(140, 180, objects)[1]["boxes"].float())
    if objects and name not in ("grayscale", "blur"):
        assert moved, "some of twelve images were changed"


def test_the_augmentations_of_recipes_are_those_of_the_data() -> None:
    assert tuple(AUGMENTATIONS) == get_args(Augmentation)
