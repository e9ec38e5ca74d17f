"""The size and normalisation of the images of a model of transformers, from its folder or its family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bucketrank.catalogue import LibraryInputSettings
from bucketrank.catalogue.model_settings import require_few_pixels
from bucketrank.detectors.backbone import IMAGENET_MEAN, IMAGENET_STD
from bucketrank.detectors.input_resizing import InputTransform

SQUARE_SIDE = 640  # of models with square inputs whose folder names no size
SHORTER_SIDE, LONGER_SIDE = 800, 1333  # of the others
PROCESSOR_KEYS = ("size", "do_normalize", "image_mean", "image_std")  # of preprocessor_config.json


@dataclass(frozen=True)
class Family:
    """The usual images of a family of models: square or not, normalised or not, sides a multiple of ``divisor``."""

    square: bool = True
    normalised: bool = True
    divisor: int = 32


# By the ``model_type`` of the configuration.
FAMILIES = {
    "deformable_detr": Family(square=False, divisor=1),
    "conditional_detr": Family(square=False, divisor=1),
    "dab-detr": Family(square=False, divisor=1),
    "rt_detr": Family(normalised=False),
    "rt_detr_v2": Family(normalised=False),
    "d_fine": Family(normalised=False),
    "deimv2": Family(normalised=False),
    "lw_detr": Family(),
    "rf_detr": Family(),
}


class SquareTransform(InputTransform):
    """Resize every image to a square; in training, one of several sizes is drawn for the whole batch."""

    def forward(
        self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> tuple[Any, list[dict[str, Tensor]] | None]:
        side = self.torch_choice(list(self.min_size)) if self.training else self.min_size[-1]
        self.fixed_size = (side, side)
        batch, resized = super().forward(images, targets)
        return batch, resized


def input_transform(config: Any, processor: Mapping[str, Any], inputs: LibraryInputSettings) -> InputTransform:
    """Return the transform of a model: the settings of the user, else of its folder, else of its family."""
    family = FAMILIES[config.model_type]
    size = processor.get("size") or {}
    square = "height" in size or (family.square and "shortest_edge" not in size)
    normalised = processor.get("do_normalize", family.normalised)
    mean = inputs.image_mean or (processor.get("image_mean") or IMAGENET_MEAN if normalised else (0.0, 0.0, 0.0))
    std = inputs.image_std or (processor.get("image_std") or IMAGENET_STD if normalised else (1.0, 1.0, 1.0))
    normalisation: dict[str, Any] = {"image_mean": list(mean), "image_std": list(std)}
    if not square:
        sizes = inputs.sizes or (int(size.get("shortest_edge", SHORTER_SIDE)),)
        longest = inputs.max_size or max(int(size.get("longest_edge", LONGER_SIDE)), *sizes)
        require_few_pixels(max(sizes), longest)
        divisor = inputs.size_divisor or 1
        return InputTransform(min_size=sizes, max_size=longest, size_divisible=divisor, **normalisation)
    sides = inputs.sizes or (int(size.get("height", _usual_side(config))),)
    require_few_pixels(max(sides), max(sides))
    _check_sides(config, sides, inputs)
    return SquareTransform(min_size=sides, max_size=max(sides), size_divisible=1, fixed_size=None, **normalisation)


def side_divisor(config: Any) -> int:
    """Return the number that the sides of a model's inputs must be multiples of."""
    backbone = getattr(config, "backbone_config", None)
    patch, windows = getattr(backbone, "patch_size", None), getattr(backbone, "num_windows", None)
    if config.model_type == "lw_detr" and patch and windows:
        return int(patch) * math.isqrt(windows)
    if config.model_type == "rf_detr" and patch and windows:
        return int(patch) * int(windows)
    return FAMILIES[config.model_type].divisor


def _usual_side(config: Any) -> int:
    """Return the side that the backbone was made for, or the usual one, as a valid side."""
    side = getattr(getattr(config, "backbone_config", None), "image_size", None)
    divisor = side_divisor(config)
    usual = side if config.model_type == "rf_detr" and isinstance(side, int) else SQUARE_SIDE
    return max(divisor, round(usual / divisor) * divisor)


def _check_sides(config: Any, sides: tuple[int, ...], inputs: LibraryInputSettings) -> None:
    divisor = side_divisor(config)
    for side in sides:
        if side % divisor:
            near = max(divisor, round(side / divisor) * divisor)
            raise ValueError(
                f"inputs.min_size: expected multiples of {divisor} for the square inputs of {config.model_type}, "
                f"got {side}; the nearest is {near}"
            )
    if inputs.max_size is not None and inputs.max_size != max(sides):
        raise ValueError(
            f"inputs.max_size: expected null for a model with square inputs, got {inputs.max_size}; set inputs.min_size"
        )
    if inputs.size_divisor is not None:
        raise ValueError(
            f"inputs.size_divisor: expected null for a model with square inputs, which are not padded, "
            f"got {inputs.size_divisor}; set inputs.min_size"
        )
