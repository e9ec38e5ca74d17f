"""Augmentation of images and their objects.

The detector itself scales images to its input size, including random sizes. Randomness comes from torch's global
generator, which a DataLoader seeds for each worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchvision.transforms import v2

DETR_SHORT_SIDES = (400, 500, 600)
DETR_LONG_SIDE = 4200
DETR_CROP = (384, 600)

Transform = Callable[..., Any]


# The transforms of torchvision that also move boxes and masks, with settings for detection. Each applies to a part of
# the images, so that the detector also sees images as they are.
AUGMENTATIONS: dict[str, Callable[[], Any]] = {
    # Objects from half to twice their size, on a canvas that stays the same.
    "scale_jitter": lambda: v2.RandomApply([v2.RandomAffine(0, translate=(0.2, 0.2), scale=(0.5, 2.0))], p=0.5),
    "zoom_out": lambda: v2.RandomZoomOut(side_range=(1.0, 3.0)),
    "iou_crop": lambda: UnlessThin(v2.RandomIoUCrop()),
    "rotation": lambda: v2.RandomApply([v2.RandomRotation(10)], p=0.5),
    "vertical_flip": lambda: v2.RandomVerticalFlip(),
    "grayscale": lambda: v2.RandomGrayscale(),
    "blur": lambda: UnlessThin(v2.RandomApply([v2.GaussianBlur(5, sigma=(0.1, 2.0))], p=0.2)),
}
LEAST_SIDE = 4  # pixels of an image that can be cropped to 30 % and blurred


class UnlessThin(v2.Transform):
    """A step that thin images skip, because it fails with a side below ``LEAST_SIDE``."""

    def __init__(self, step: v2.Transform) -> None:
        super().__init__()
        self.step = step

    def forward(self, *inputs: Any) -> Any:
        if min(v2.functional.get_size(inputs[0])) < LEAST_SIDE:
            return inputs
        return self.step(*inputs)


def train_transform(
    *, flip: float = 0.5, jitter: bool = False, crop: bool = False, augment: Sequence[str] = ()
) -> Transform:
    """Return the augmentation for training: horizontal flips with probability ``flip``, and optional steps.

    ``jitter`` changes the colours. ``augment`` names further steps of AUGMENTATIONS, in this order. ``crop`` applies
    DETR's policy: half of the images are scaled to a short side of 400, 500 or 600 pixels and cropped to a random
    window with sides of 384 to 600 pixels. Objects outside the image, or with a side below one pixel, are removed with
    their labels and masks; ``area`` stays that of the annotation.
    Pixels are returned as float32 in [0, 1].

    Args:
        flip: probability of a horizontal flip.
        jitter: change the colours.
        crop: use DETR's random crops.
        augment: names of further steps.
    """
    steps: list[Any] = [v2.RandomHorizontalFlip(flip)]
    if jitter:
        steps.append(v2.RandomPhotometricDistort())
    steps += [AUGMENTATIONS[name]() for name in augment]
    if crop:
        cut = v2.Compose([RandomShortSide(list(DETR_SHORT_SIDES), DETR_LONG_SIDE), RandomWindow(*DETR_CROP)])
        steps.append(v2.RandomApply([cut], p=0.5))
    steps += [v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(labels_getter=values_per_object)]
    composed: Transform = v2.Compose([*steps, *_to_model()])
    return composed


def eval_transform() -> Transform:
    """Return the transform for evaluation, which only converts pixels to float32 in [0, 1]."""
    composed: Transform = v2.Compose(_to_model())
    return composed


class RandomShortSide(v2.RandomShortestSize):
    """Scale to a random length of the short side, like torchvision's, but keep at least one pixel of it."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        params: dict[str, Any] = super().make_params(flat_inputs)
        return params | {"size": tuple(max(1, side) for side in params["size"])}


class RandomWindow(v2.Transform):
    """Crop a random window with sides from [smallest, largest], limited to the sides of the image."""

    def __init__(self, smallest: int, largest: int) -> None:
        super().__init__()
        self.smallest = smallest
        self.largest = largest

    def make_params(self, flat_inputs: list[Any]) -> dict[str, int]:
        height, width = v2.functional.get_size(flat_inputs[0])
        window = {"height": self._side(height), "width": self._side(width)}
        window["top"] = _random_int(0, height - window["height"])
        window["left"] = _random_int(0, width - window["width"])
        return window

    def transform(self, inpt: Any, params: dict[str, int]) -> Any:
        return self._call_kernel(v2.functional.crop, inpt, **params)

    def _side(self, side: int) -> int:
        return _random_int(min(self.smallest, side), min(self.largest, side))


def values_per_object(item: tuple[Any, dict[str, Any]]) -> list[torch.Tensor]:
    """Return the tensors of the target with one entry per box, except masks."""
    return [item[1][name] for name in ("labels", "area", "iscrowd") if name in item[1]]


def _to_model() -> list[Any]:
    return [v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()]


def _random_int(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))
