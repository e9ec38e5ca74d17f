"""Checks of images and targets in the format of torchvision's detectors."""

from __future__ import annotations

from collections.abc import Sequence

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
    for number, (image, target) in enumerate(zip(images, targets, strict=True)):
        image_id = f" (image_id {_as_number(target['image_id'])})" if "image_id" in target else ""
        _check_target(f"target of image {number}{image_id}", image, target, num_classes, masks=masks)


def _check_target(name: str, image: Tensor, target: Target, num_classes: int, *, masks: bool) -> None:
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
    if not len(boxes):
        return
    x1, y1, x2, y2 = boxes.unbind(1)
    _refuse(name, boxes, ~boxes.isfinite().all(1), "finite boxes")
    _refuse(name, boxes, (x2 <= x1) | (y2 <= y1), "boxes (x1, y1, x2, y2) with x1 < x2 and y1 < y2")
    outside = (x2 <= 0) | (y2 <= 0) | (x1 >= width) | (y1 >= height)
    _refuse(name, boxes, outside, f"boxes that overlap the image of {width} x {height} pixels")
    invalid = torch.where((labels < 1) | (labels > num_classes))[0]
    if len(invalid):
        box = int(invalid[0])
        raise ValueError(f"{name}: expected labels from 1 to {num_classes}, got {int(labels[box])} for box {box}")


def _refuse(name: str, boxes: Tensor, invalid: Tensor, expected: str) -> None:
    if invalid.any():
        box = int(torch.where(invalid)[0][0])
        values = [round(value, 3) for value in boxes[box].tolist()]
        raise ValueError(f"{name}: expected {expected}, got {values} for box {box}")


def _as_number(image_id: object) -> object:
    return image_id.item() if isinstance(image_id, Tensor) and image_id.numel() == 1 else image_id
