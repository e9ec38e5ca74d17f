"""The groups of settings that every detector takes: its backbone and how images enter it."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from bucketrank.catalogue.fields import Settings
from bucketrank.suggestions import MAX_COMPARED, short_repr

BatchNorm = Literal["auto", "frozen", "trained"]
SWIN_NAMES = ("swin_tiny", "swin_large")
# Pixels of a resized image: as many as Pillow decodes, 2.1 GB as floats. 10,000 x 10,000 fit. The limit also holds for
# weights files of others.
MAX_PIXELS = 178_956_970
MAX_DIVISOR = 2**10


@dataclass(frozen=True)
class BackboneSettings(Settings):
    """The backbone: its name, its weights, and how much of it is trained.

    ``name`` may carry timm's tag of the weights: ``resnet50.tv_in1k`` are torchvision's, those of the published
    recipes. A weights file has timm's layout or, for Swin, that of transformers (also as a folder). Pickles are never
    read. A frozen stage runs in evaluation mode, and the stem is frozen with the first stage. Frozen batch norms use
    their running statistics and never update them; their affine parameters are trained unless their stage is frozen.
    With ``checkpointing``, trained batch norms count each batch twice in their running statistics.
    """

    group: ClassVar[str] = "backbone"

    name: Annotated[str, "a timm model that supports features_only, swin_tiny or swin_large"] = "resnet50"
    weights: Annotated[str | None, "null (random), pretrained (ImageNet, downloaded) or a .safetensors file"] = None
    frozen_stages: Annotated[int | None, "stages that are not trained, 0 to 4 (null: 1 with weights, 0 without)"] = None
    batch_norm: Annotated[BatchNorm, "frozen, trained, or auto (frozen with weights, trained without)"] = "auto"
    deformable_groups: Annotated[int, "offset groups of deformable convolutions in stages 3 to 5; 0 for none"] = 0
    checkpointing: Annotated[bool, "recompute activations in the backward pass to save memory"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("weights", "null, pretrained or a path", holds=self.weights != "")
        stages = self.frozen_stages
        self.require("frozen_stages", "0 to 4 or null", holds=stages is None or stages in range(5))
        self.require("deformable_groups", "at least 0", holds=self.deformable_groups >= 0)
        without_convolutions = self.name in SWIN_NAMES
        self.require(
            "deformable_groups", f"0 for {self.name}", holds=not (self.deformable_groups and without_convolutions)
        )

    def check_name(self) -> None:
        """Raise unless such a model exists. Apart from the other checks because timm imports torch."""
        import timm

        if self.name not in SWIN_NAMES and not timm.is_model(self.name):
            near = difflib.get_close_matches(self.name[:MAX_COMPARED], [*SWIN_NAMES, *timm.list_models()], n=3)
            raise ValueError(
                f"backbone.name: expected a timm model, {' or '.join(SWIN_NAMES)}, got {short_repr(self.name)}; "
                + (f"the nearest names are {', '.join(near)}" if near else "see timm.list_models()")
            )


def require_few_pixels(shorter: int, longer: int) -> None:
    """Raise ValueError if resized images may have more than MAX_PIXELS pixels."""
    if shorter * longer > MAX_PIXELS:
        raise ValueError(
            f"inputs.max_size: expected resized images of at most {MAX_PIXELS:,} pixels, got {shorter} (min_size) x "
            f"{longer}; lower one of the two, or cut the images into tiles"
        )


class ImagePreparation(Settings):
    """Checks that the settings of all inputs share."""

    image_mean: Any
    image_std: Any
    size_divisor: Any

    def require_valid_preparation(self) -> None:
        """Raise unless mean, deviation and divisor are valid."""
        divisor = self.size_divisor
        self.require("size_divisor", f"1 to {MAX_DIVISOR}", holds=divisor is None or 1 <= divisor <= MAX_DIVISOR)
        mean, std = self.image_mean or (), self.image_std or ()
        self.require("image_mean", "finite numbers", holds=all(map(math.isfinite, mean)))
        self.require("image_std", "finite numbers above 0", holds=all(math.isfinite(x) and x > 0 for x in std))


@dataclass(frozen=True)
class InputSettings(ImagePreparation):
    """The preparation of images: resizing, normalisation and padding.

    A resized image has at most ``min_size`` x ``max_size`` pixels, which must be at most MAX_PIXELS.
    """

    group: ClassVar[str] = "inputs"

    min_size: Annotated[
        int | tuple[int, ...],
        "shorter side after resizing; of several, training draws one and evaluation uses the last",
    ] = 800
    max_size: Annotated[int, "upper limit of the longer side after resizing"] = 1333
    image_mean: Annotated[tuple[float, float, float] | None, "mean to subtract (null: the backbone's)"] = None
    image_std: Annotated[tuple[float, float, float] | None, "deviation to divide by (null: the backbone's)"] = None
    size_divisor: Annotated[int | None, "pad to a multiple of this (null: 32, and 1 in Co-DETR)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.min_size,) if isinstance(self.min_size, int) else tuple(self.min_size)
        if not sizes or min(sizes) < 1 or self.max_size < max(sizes):
            raise ValueError(
                "inputs.min_size: expected one or more sizes between 1 and max_size, "
                f"got {self.min_size} with max_size {self.max_size}"
            )
        require_few_pixels(max(sizes), self.max_size)
        self.require_valid_preparation()
