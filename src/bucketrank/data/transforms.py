"""Augmentation of images with their boxes and masks.

The detector itself scales images to its input size, including random sizes. Randomness comes from torch's global
generator, which a DataLoader seeds for each worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchvision.transforms import v2

from bucketrank.settings.choices import Augmentation

DETR_SHORT_SIDES = (400, 500, 600)
DETR_LONG_SIDE = 4200
DETR_CROP = (384, 600)

Transform = Callable[..., Any]


# torchvision transforms that also move boxes and masks, with settings for detection. Each applies at random, so that
# the detector also sees unchanged images.
AUGMENTATIONS: dict[Augmentation, Callable[[], Any]] = {
    # Scales objects to half to twice their size; the canvas size stays.
    "scale_jitter": lambda: v2.RandomApply([v2.RandomAffine(0, translate=(0.2, 0.2), scale=(0.5, 2.0))], p=0.5),
    "zoom_out": lambda: v2.RandomZoomOut(side_range=(1.0, 3.0)),
    "iou_crop": lambda: UnlessThin(v2.RandomIoUCrop()),
    "rotation": lambda: v2.RandomApply([v2.RandomRotation(10)], p=0.5),
    "vertical_flip": lambda: v2.RandomVerticalFlip(),
    "grayscale": lambda: v2.RandomGrayscale(),
    "blur": lambda: UnlessThin(v2.RandomApply([v2.GaussianBlur(5, sigma=(0.1, 2.0))], p=0.2)),
}
MIN_SIDE = 4  # pixels; thinner images cannot be cropped to 30 % or blurred, and are not mixed


class UnlessThin(v2.Transform):
    """A transform that skips images with a side below ``MIN_SIDE``, on which it would fail."""

    def __init__(self, step: v2.Transform) -> None:
        super().__init__()
        self.step = step

    def forward(self, *inputs: Any) -> Any:
        if min(v2.functional.get_size(inputs[0])) < MIN_SIDE:
            return inputs
        return self.step(*inputs)


def train_transform(
    *, flip: float = 0.5, jitter: bool = False, crop: bool = False, augment: Sequence[Augmentation] = ()
) -> Transform:
    """Build the training augmentation: horizontal flips with probability ``flip``, and optional steps.

    ``jitter`` changes the colours. ``augment`` names further steps of AUGMENTATIONS, in this order. ``crop`` applies
    the DETR policy: half of the images are scaled to a short side of 400, 500 or 600 pixels and cropped to a random
    window with sides of 384 to 600 pixels. Objects outside the image, or with a side below one pixel, are removed with
    their labels and masks; ``area`` keeps the annotated value. Pixels are returned as float32 in [0, 1].
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
    """Build the evaluation transform, which only converts pixels to float32 in [0, 1]."""
    composed: Transform = v2.Compose(_to_model())
    return composed


class RandomShortSide(v2.RandomShortestSize):
    """Scale to a random short side like the torchvision transform, but keep at least one pixel."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        params: dict[str, Any] = super().make_params(flat_inputs)
        return params | {"size": tuple(max(1, side) for side in params["size"])}


class RandomWindow(v2.Transform):
    """Crop a random window with sides from [min_side, max_side], limited to the image."""

    def __init__(self, min_side: int, max_side: int) -> None:
        super().__init__()
        self.min_side = min_side
        self.max_side = max_side

    def make_params(self, flat_inputs: list[Any]) -> dict[str, int]:
        height, width = v2.functional.get_size(flat_inputs[0])
        window = {"height": self._side(height), "width": self._side(width)}
        window["top"] = _random_int(0, height - window["height"])
        window["left"] = _random_int(0, width - window["width"])
        return window

    def transform(self, inpt: Any, params: dict[str, int]) -> Any:
        return self._call_kernel(v2.functional.crop, inpt, **params)

    def _side(self, side: int) -> int:
        return _random_int(min(self.min_side, side), min(self.max_side, side))


def values_per_object(item: tuple[Any, dict[str, Any]]) -> list[torch.Tensor]:
    """List the target tensors with one entry per box, except masks."""
    return [item[1][name] for name in ("labels", "area", "iscrowd") if name in item[1]]


def _to_model() -> list[Any]:
    return [v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()]


def _random_int(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))
