"""What happens to an image and its objects between the file and the model.

Scaling to the model's size, also to a random one, is the detector's own first step. Randomness comes from torch's
global generator, which a DataLoader seeds for each worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchvision.transforms import v2

DETR_SHORT_SIDES = (400, 500, 600)
DETR_LONG_SIDE = 4200
DETR_CROP = (384, 600)

Transform = Callable[..., Any]


def train_transform(*, flip: float = 0.5, jitter: bool = False, crop: bool = False) -> Transform:
    """Flip with probability ``flip``; colours with ``jitter``; with ``crop``, DETR's policy.

    That policy: half of the images are scaled to a short side of 400, 500 or 600 and cut to a random window of 384 to
    600 pixels a side. Objects that are cut away, or have a side of less than a pixel, leave the target with their
    labels and masks; ``area`` stays that of the annotation. Pixels come out as float32 in [0, 1].
    """
    steps: list[Any] = [v2.RandomHorizontalFlip(flip)]
    if jitter:
        steps.append(v2.RandomPhotometricDistort())
    if crop:
        cut = v2.Compose([v2.RandomShortestSize(list(DETR_SHORT_SIDES), DETR_LONG_SIDE), RandomWindow(*DETR_CROP)])
        steps.append(v2.RandomApply([cut], p=0.5))
    steps += [v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(labels_getter=of_each_object)]
    composed: Transform = v2.Compose([*steps, *_to_model()])
    return composed


def eval_transform() -> Transform:
    """Pixels as float32 in [0, 1], nothing else."""
    composed: Transform = v2.Compose(_to_model())
    return composed


class RandomWindow(v2.Transform):
    """Cut a window whose sides are drawn from [smallest, largest], or are those of a smaller image."""

    def __init__(self, smallest: int, largest: int) -> None:
        super().__init__()
        self.smallest = smallest
        self.largest = largest

    def make_params(self, flat_inputs: list[Any]) -> dict[str, int]:
        height, width = v2.functional.get_size(flat_inputs[0])
        window = {"height": self._side(height), "width": self._side(width)}
        window["top"] = _drawn(0, height - window["height"])
        window["left"] = _drawn(0, width - window["width"])
        return window

    def transform(self, inpt: Any, params: dict[str, int]) -> Any:
        return self._call_kernel(v2.functional.crop, inpt, **params)

    def _side(self, side: int) -> int:
        return _drawn(min(self.smallest, side), min(self.largest, side))


def of_each_object(item: tuple[Any, dict[str, Any]]) -> list[torch.Tensor]:
    """What has one entry for each box, masks aside."""
    return [item[1][name] for name in ("labels", "area", "iscrowd") if name in item[1]]


def _to_model() -> list[Any]:
    return [v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()]


def _drawn(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))
