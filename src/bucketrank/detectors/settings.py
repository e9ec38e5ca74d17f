"""The settings that all detectors share; what only one detector has is a keyword of that detector.

Nothing here needs torch: the command line reads settings before it loads anything heavy.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

RANKING_SCOPES = ("batch", "image", "global")
BOX_LOSSES = ("giou", "l1", "smooth_l1")
BATCH_NORMS = ("auto", "frozen", "trained")
SWINS = ("swin_tiny", "swin_large")
LARGEST_SIDE = 2**15  # to which an image is resized
LARGEST_DIVISOR = 2**10


@dataclass(frozen=True)
class BackboneSettings:
    """Which backbone, with which weights, and how much of it is trained.

    Attributes:
        name: a model of timm with ``features_only`` (a tag may follow: ``resnet50.tv_in1k`` are torchvision's weights,
            those of the published recipes), ``swin_tiny`` or ``swin_large``.
        weights: None for random ones, ``"pretrained"`` for those of ImageNet (downloaded), or a .safetensors file in
            timm's or, for Swin, transformers' layout; for Swin also a folder. Pickles are never read.
        frozen_stages: how many stages are not trained, the stem with the first; None is 1 with weights and 0 without.
            A frozen stage runs in eval mode.
        batch_norm: ``"frozen"`` uses the running statistics and never updates them, the affine parameters of stages
            that are not frozen are trained; ``"trained"`` is the usual batch norm; ``"auto"`` is frozen with weights
            and trained without.
        deformable_groups: 0, or the offset groups of deformable convolutions in stages 3 to 5 of a ResNet.
        checkpointing: recompute activations in the backward pass instead of storing them. Trained batch norms then see
            each batch twice in their running statistics.
    """

    name: str = "resnet50"
    weights: str | None = None
    frozen_stages: int | None = None
    batch_norm: str = "auto"
    deformable_groups: int = 0
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.weights == "":
            raise ValueError("BackboneSettings: expected weights to be None, 'pretrained' or a path, got ''")
        if self.frozen_stages is not None and self.frozen_stages not in range(5):
            raise ValueError(f"BackboneSettings: expected frozen_stages from 0 to 4 or None, got {self.frozen_stages}")
        if self.batch_norm not in BATCH_NORMS:
            raise ValueError(
                f"BackboneSettings: expected batch_norm to be one of {', '.join(BATCH_NORMS)}, got {self.batch_norm!r}"
            )
        if self.deformable_groups < 0:
            raise ValueError(
                f"BackboneSettings: expected deformable_groups of at least 0, got {self.deformable_groups}"
            )
        if self.deformable_groups and self.name in SWINS:
            raise ValueError(
                f"BackboneSettings: expected deformable_groups=0 for {self.name}, got {self.deformable_groups}"
            )

    def check_name(self) -> None:
        """Raise unless there is such a model; building does. Apart from the other checks, since timm brings torch."""
        import timm

        if self.name not in SWINS and not timm.is_model(self.name):
            near = difflib.get_close_matches(self.name, [*SWINS, *timm.list_models()], n=3)
            raise ValueError(
                f"BackboneSettings: expected name to be a model of timm, {' or '.join(SWINS)}, got {self.name!r}; "
                + (f"the nearest names are {', '.join(near)}" if near else "see timm.list_models()")
            )


@dataclass(frozen=True)
class LossSettings:
    """Which loss trains a detector, and how. ``None`` is the choice of the loss's or the detector's own recipe.

    ``ranking_scope`` is what one ranking covers: ``"batch"``, all images of the process (the paper); ``"image"``, each
    image by itself, averaged over the images with objects; ``"global"``, the images of all processes, so that the loss
    does not depend on how a batch is split.
    """

    name: str = "rs"
    method: str = "exact"
    delta: float | None = None
    ranking_scope: str = "batch"
    interpolate: bool = False  # AP: the original, interpolated loss
    balance_period: int | None = None  # aLRP: iterations between two updates of the boxes' weight; None: 7330
    focal_alpha: float = 0.25
    focal_gamma: float = 2.0
    box_loss: str | None = None
    box_weight: float | None = None

    def __post_init__(self) -> None:
        if self.ranking_scope not in RANKING_SCOPES:
            raise ValueError(_expected("ranking_scope", f"one of {', '.join(RANKING_SCOPES)}", self.ranking_scope))
        if self.box_loss is not None and self.box_loss not in BOX_LOSSES:
            raise ValueError(_expected("box_loss", f"one of {', '.join(BOX_LOSSES)}", self.box_loss))
        if self.balance_period is not None and self.balance_period < 1:
            raise ValueError(_expected("balance_period", "at least 1", self.balance_period))
        for name in ("focal_alpha", "focal_gamma", "box_weight"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(_expected(name, "a finite number of at least 0", value))


@dataclass(frozen=True)
class InputSettings:
    """How images enter.

    They are resized to a shorter side of ``min_size`` (of several, in training one by chance, else the last) and
    a longer of at most ``max_size``, normalised by the backbone's mean and deviation unless these are given, and padded
    to a multiple of ``size_divisor``: unless it is given, of 32, and in Co-DETR of 1.
    """

    min_size: int | tuple[int, ...] = 800
    max_size: int = 1333
    image_mean: tuple[float, float, float] | None = None
    image_std: tuple[float, float, float] | None = None
    size_divisor: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.min_size,) if isinstance(self.min_size, int) else tuple(self.min_size)
        if not sizes or min(sizes) < 1 or self.max_size < max(sizes):
            wanted = "one or more sizes between 1 and max_size"
            raise ValueError(_expected("min_size", wanted, f"{self.min_size} with max_size {self.max_size}"))
        if self.max_size > LARGEST_SIDE:
            raise ValueError(_expected("max_size", f"at most {LARGEST_SIDE}", self.max_size))
        if self.size_divisor is not None and not 1 <= self.size_divisor <= LARGEST_DIVISOR:
            raise ValueError(_expected("size_divisor", f"from 1 to {LARGEST_DIVISOR}", self.size_divisor))
        if self.image_mean is not None and not all(map(math.isfinite, self.image_mean)):
            raise ValueError(_expected("image_mean", "finite numbers", self.image_mean))
        if self.image_std is not None and not all(math.isfinite(each) and each > 0 for each in self.image_std):
            raise ValueError(_expected("image_std", "finite numbers above 0", self.image_std))


def _expected(setting: str, wanted: str, got: object) -> str:
    return f"detector settings: expected {setting} to be {wanted}, got {got!r}"
