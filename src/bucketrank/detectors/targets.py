"""Checks of images and targets in the format of torchvision's detectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Target = dict[str, Tensor]


def check_images(images: Sequence[Tensor]) -> None:
    """Raise unless every image is a float tensor (3, height, width)."""
    for number, image in enumerate(images):
        if not isinstance(image, Tensor) or image.dim() != 3 or image.shape[0] != 3:
            got = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(f"image {number}: expected a tensor of shape (3, height, width), got {got}")
        if not image.is_floating_point():
            raise TypeError(
                f"image {number}: expected floats from 0 to 1, got {image.dtype}; convert with "
                "torchvision.transforms.v2.functional.to_dtype(image, torch.float32, scale=True)"
            )


def check_targets(images: Sequence[Tensor], targets: Sequence[Target] | None, num_classes: int, *, masks: bool) -> None:
    """Raise unless every image has valid targets, naming the image and the box; an image may have no objects."""
    if targets is None:
        raise ValueError("targets: expected a list in training mode, got None; call model.eval() to detect")
    if len(targets) != len(images):
        raise ValueError(f"targets: expected one for each of {len(images)} images, got {len(targets)}")
    pairs = zip(images, targets, strict=True)
    named = [(_TargetName(number, target), image, target) for number, (image, target) in enumerate(pairs)]
    for name, image, target in named:
        _check_shapes(name, image, target, masks=masks)
    checks = [(name, check) for name, image, target in named for check in _value_checks(image, target, num_classes)]
    # All values are read at once, because each reading makes the host wait for the device.
    if checks and torch.stack([check.invalid.any() for _, check in checks]).any():
        for name, check in checks:
            check.raise_if_any(name)


@dataclass(frozen=True)
class _TargetName:
    """The name of a target in messages. An image_id on a device is read only if there is a message."""

    number: int
    target: Target

    def __str__(self) -> str:
        image_id = f" (image_id {_as_number(self.target['image_id'])})" if "image_id" in self.target else ""
        return f"target of image {self.number}{image_id}"


@dataclass(frozen=True)
class _ValueCheck:
    """Rows (n,) of ``values`` that are ``invalid``, and what was expected of them."""

    values: Tensor
    invalid: Tensor
    expected: str

    def raise_if_any(self, name: _TargetName) -> None:
        if self.invalid.any():
            box = int(torch.where(self.invalid)[0][0])
            value = self.values[box].tolist()
            value = [round(number, 3) for number in value] if isinstance(value, list) else value
            raise ValueError(f"{name}: expected {self.expected}, got {value} for box {box}")


def _check_shapes(name: _TargetName, image: Tensor, target: Target, *, masks: bool) -> None:
    for key in ("boxes", "labels", "masks")[: 3 if masks else 2]:
        if not isinstance(target.get(key), Tensor):
            raise TypeError(f"{name}: expected a tensor under {key!r}, got {type(target.get(key)).__name__}")
    boxes, labels = target["boxes"], target["labels"]
    if not boxes.is_floating_point() or boxes.dim() != 2 or boxes.shape[1] != 4:
        raise ValueError(
            f"{name}: expected boxes as floats of shape (objects, 4), got {boxes.dtype} of shape {tuple(boxes.shape)}"
        )
    if (
        labels.is_floating_point()
        or labels.is_complex()
        or labels.dtype == torch.bool
        or labels.shape != boxes.shape[:1]
    ):
        raise ValueError(
            f"{name}: expected labels as integers of shape ({len(boxes)},), one for each box, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    height, width = image.shape[-2:]
    if masks and target["masks"].shape != (len(boxes), height, width):
        raise ValueError(
            f"{name}: expected masks of shape {(len(boxes), height, width)}, one for each box, as large as the image, "
            f"got {tuple(target['masks'].shape)}"
        )


def _value_checks(image: Tensor, target: Target, num_classes: int) -> list[_ValueCheck]:
    boxes, labels = target["boxes"], target["labels"]
    if not len(boxes):
        return []
    height, width = image.shape[-2:]
    x1, y1, x2, y2 = boxes.unbind(1)
    outside = (x2 <= 0) | (y2 <= 0) | (x1 >= width) | (y1 >= height)
    return [
        _ValueCheck(boxes, ~boxes.isfinite().all(1), "finite boxes"),
        _ValueCheck(boxes, (x2 <= x1) | (y2 <= y1), "boxes (x1, y1, x2, y2) with x1 < x2 and y1 < y2"),
        _ValueCheck(boxes, outside, f"boxes that overlap the image of {width} x {height} pixels"),
        _ValueCheck(labels, (labels < 1) | (labels > num_classes), f"labels from 1 to {num_classes}"),
    ]


def _as_number(image_id: object) -> object:
    return image_id.item() if isinstance(image_id, Tensor) and image_id.numel() == 1 else image_id
