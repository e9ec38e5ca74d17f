"""The built-in losses: settings and spec of each loss.

This is the only place that lists the losses. To add one, write its settings class and its :class:`LossSpec` here, and
its function in ``losses/``. A score-based loss on IoU targets needs nothing else. Any other loss also needs a
criterion, a subclass of ``bucketrank.detectors.criterion.Criterion``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from bucketrank.lazy import import_object
from bucketrank.settings.choices import DEFAULT_DELTAS, ALRPMethod, Method
from bucketrank.settings.fields import Settings, describe

RankingScope = Literal["batch", "image", "global"]
BoxLoss = Literal["giou", "l1", "smooth_l1"]
MAX_MEMORY = 1_000_000  # upper bound for loss.memory


AnyLossSettings = TypeVar("AnyLossSettings", bound="LossSettings")


@dataclass(frozen=True)
class LossSettings(Settings):
    """Base class of the loss settings. Each loss adds its own in a subclass; ``loss_settings`` fills in its name.

    ``ranking_scope`` defines which images are ranked together: ``"batch"``, all images of the process (the paper's
    choice); ``"image"``, each image separately, averaged over the images with objects; ``"global"``, the images of all
    processes, so that the loss does not depend on how a batch is split.
    """

    group: ClassVar[str] = "loss"

    name: Annotated[str, "the loss that trains the detector"] = "rs"
    ranking_scope: Annotated[RankingScope, "images ranked together: batch, image, or global (all processes)"] = "batch"
    box_loss: Annotated[BoxLoss | None, "box loss (null: as published for this loss and detector)"] = None
    smooth_l1_beta: Annotated[float, "smooth L1 is quadratic where a box delta differs by less than this"] = 1.0
    box_weight: Annotated[float | None, "fixed weight of the box loss, instead of box_balance (null: as published)"] = (
        None
    )
    box_balance: Annotated[
        bool | None, "scale the box loss to the value of the classification loss (null: only with rs and rsq)"
    ] = None
    box_confidence: Annotated[
        bool | None, "weight the box loss of each positive by its highest class score (null: as published)"
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("box_weight", "smooth_l1_beta")
        fixed = self.box_weight is not None
        self.require("box_weight", "null with loss.box_balance true", holds=not (fixed and self.box_balance))

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the loss function: the settings of this loss, without their name prefix.

        >>> VarifocalSettings().arguments
        {'alpha': 0.75, 'gamma': 2.0}
        """
        own = [field.name for field in fields(self) if field.name not in ("name", *self.shared)]
        return {name.partition("_")[2]: getattr(self, name) for name in own}

    @property
    def shared(self) -> dict[str, Any]:
        """The settings that every loss has, without the name."""
        return {field.name: getattr(self, field.name) for field in fields(LossSettings) if field.name != "name"}

    def for_run(self: AnyLossSettings, *, batches_per_epoch: int) -> AnyLossSettings:  # noqa: ARG002 (for subclasses)
        """Fill in the values that depend on the data set."""
        return self

    def sampled(self) -> LossSettings:
        """Return the loss for heads that train on a balanced sample of their candidates."""
        return self


@dataclass(frozen=True)
class RankingSettings(LossSettings):
    """Settings of the ranking losses with a smoothed step function."""

    default_delta: ClassVar[float] = DEFAULT_DELTAS["ap"]

    method: Annotated[Method, "exact, bucketed (the paper's approximation) or pairwise (the definition)"] = "exact"
    delta: Annotated[
        float | None,
        "two logits closer than this count as partly tied "
        f"(null: {DEFAULT_DELTAS['ap']:g}, for rs {DEFAULT_DELTAS['rs']:g})",
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("delta")

    @property
    def effective_delta(self) -> float:
        """``delta``, or the default of the loss."""
        return self.default_delta if self.delta is None else self.delta


@dataclass(frozen=True)
class RememberingSettings(RankingSettings):
    """Settings of the losses with a score memory (``detectors/criterion/memory.py``)."""

    memory: Annotated[int, "ap, rs, rsq: positives and negatives of earlier steps that join each ranking (0: none)"] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("memory", f"from 0 to {MAX_MEMORY}", holds=0 <= self.memory <= MAX_MEMORY)
        alone = self.memory and self.ranking_scope == "image"
        self.require("memory", "0 with loss.ranking_scope image, which compares no images", holds=not alone)


@dataclass(frozen=True)
class RankSortSettings(RememberingSettings):
    """Settings of RS loss."""

    default_delta: ClassVar[float] = DEFAULT_DELTAS["rs"]


@dataclass(frozen=True)
class APSettings(RememberingSettings):
    """Settings of AP loss."""

    interpolate: Annotated[bool, "ap: the original, interpolated loss"] = False


@dataclass(frozen=True)
class ALRPSettings(RankingSettings):
    """Settings of aLRP loss."""

    default_delta: ClassVar[float] = DEFAULT_DELTAS["alrp"]
    filled_by_run: ClassVar[tuple[str, ...]] = ("balance_period",)

    method: Annotated[ALRPMethod, "exact or pairwise (the definition)"] = "exact"
    balance_period: Annotated[int | None, "alrp: iterations between updates of the box weight (null: one epoch)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("box_weight", "box_balance", "box_confidence"):
            self.require(name, "null: aLRP loss balances and ranks its boxes itself", holds=getattr(self, name) is None)
        period = self.balance_period
        self.require("balance_period", "at least 1 or null", holds=period is None or period >= 1)

    def for_run(self, *, batches_per_epoch: int) -> ALRPSettings:
        return self if self.balance_period is not None else replace(self, balance_period=batches_per_epoch)


@dataclass(frozen=True)
class ScoreBasedSettings(LossSettings):
    """Settings shared by the score-based losses. The numbers that a loss adds are finite and at least 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite(*(each.name for each in describe(type(self)) if each.type is float))
        expected = "batch or global, because a score-based loss ranks nothing"
        self.require("ranking_scope", expected, holds=self.ranking_scope != "image")


@dataclass(frozen=True)
class FocalSettings(ScoreBasedSettings):
    """Settings of focal loss."""

    focal_alpha: Annotated[float, "focal: weight of the positives; the negatives get 1 - alpha"] = 0.25
    focal_gamma: Annotated[float, "focal: focusing exponent, which lowers the weight of easy examples"] = 2.0

    def sampled(self) -> LossSettings:
        return ScoreBasedSettings(name="ce", **self.shared)


@dataclass(frozen=True)
class QualityFocalSettings(ScoreBasedSettings):
    """Settings of Quality Focal Loss."""

    quality_beta: Annotated[float, "qfl, rsq: exponent of the distance between score and IoU"] = 2.0


@dataclass(frozen=True)
class VarifocalSettings(ScoreBasedSettings):
    """Settings of Varifocal Loss."""

    varifocal_alpha: Annotated[float, "vfl: weight of the negatives"] = 0.75
    varifocal_gamma: Annotated[float, "vfl: exponent of the score in the weight of a negative"] = 2.0


@dataclass(frozen=True)
class MALSettings(ScoreBasedSettings):
    """Settings of Matchability-Aware Loss."""

    mal_gamma: Annotated[float, "mal: exponent of positive IoUs and negative scores"] = 1.5


@dataclass(frozen=True)
class IoUAwareBCESettings(ScoreBasedSettings):
    """Settings of IoU-aware BCE."""

    iabce_alpha: Annotated[
        float, "iabce: exponent of the score in the target of a positive; the IoU gets 1 - alpha"
    ] = 0.25
    iabce_gamma: Annotated[float, "iabce: exponent of the score in the weight of a negative"] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("iabce_alpha", "at most 1", holds=self.iabce_alpha <= 1)


@dataclass(frozen=True)
class RankSortQualitySettings(RankSortSettings):
    """Settings of RS loss plus Quality Focal Loss."""

    quality_beta: Annotated[float, "qfl, rsq: exponent of the distance between score and IoU"] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("quality_beta")


@dataclass(frozen=True)
class LossSpec:
    """The declaration of a loss, which is read without importing it.

    ``criterion`` is the class (a subclass of ``bucketrank.detectors.criterion.Criterion``) or its import path,
    ``"package.module:Class"``; None if the loss is part of the model. ``gradient_note`` explains the gradients in
    reports.

    ``QualityScored`` is a criterion for any score-based loss on IoU targets. It calls ``function`` with the logits, the
    targets, the settings (see :attr:`LossSettings.arguments`) and ``reduction="sum"``, and divides the sum by
    ``divisor``. ``box_weights`` tells how the published loss weights the boxes.
    """

    name: str  # name in recipes and flags
    criterion: str | Callable[..., Any] | None  # class or import path; None if part of the model
    settings: type[LossSettings] = LossSettings  # settings class
    title: str = ""  # name shown to readers
    reference: str = ""  # the publication
    gradient_note: str = ""  # explanation in reports
    function: str | Callable[..., Any] | None = None  # loss function or import path
    divisor: Literal["positives", "targets"] = "positives"  # number of positives, or the sum of the targets
    box_weights: Literal["confidence", "iou"] | None = None  # weights in the mean of the box loss

    def load(self) -> Any:
        """Import the criterion class; ValueError if the loss is part of the model."""
        if self.criterion is None:
            raise ValueError(f"loss.name: expected a loss with a criterion, got {self.name!r}, part of a model")
        return import_object(self.criterion)

    def load_function(self) -> Any:
        """Import the loss function; ValueError if the specification names none."""
        if self.function is None:
            raise ValueError(f"loss.name: expected a loss with a function, got {self.name!r}; use another criterion")
        return import_object(self.function)


_RANKING_NOTE = (
    "A positive is pushed up by the negatives ranked above it, and these negatives are pushed down by the same total. "
    "Logits that are in the right order by more than delta have no gradient."
)
_SCORE_NOTE = "This loss treats each score on its own; the rank has no influence."

# The criterion of every score-based loss on IoU targets.
QUALITY_SCORED = "bucketrank.detectors.criterion.scored:QualityScored"

BUILT_IN_LOSSES = (
    LossSpec(
        "rs",
        "bucketrank.detectors.criterion.ranked:RankSort",
        RankSortSettings,
        title="Rank & Sort loss",
        reference="Oksuz et al., Rank & Sort Loss for Object Detection and Instance Segmentation, ICCV 2021",
        gradient_note=f"{_RANKING_NOTE} A positive of lower IoU should rank below one of higher IoU.",
    ),
    LossSpec(
        "ap",
        "bucketrank.detectors.criterion.ranked:AveragePrecision",
        APSettings,
        title="AP loss",
        reference="Chen et al., AP-Loss for Accurate One-Stage Object Detection, TPAMI 2020",
        gradient_note=_RANKING_NOTE,
    ),
    LossSpec(
        "alrp",
        "bucketrank.detectors.criterion.ranked:ALRP",
        ALRPSettings,
        title="aLRP loss",
        reference="Oksuz et al., A Ranking-based, Balanced Loss Function Unifying Classification and Localisation in "
        "Object Detection, NeurIPS 2020",
        gradient_note=_RANKING_NOTE,
    ),
    LossSpec(
        "dr",
        "bucketrank.detectors.criterion.ranked:DR",
        title="DR loss",
        reference="Qian et al., DR Loss: Improving Object Detection by Distributional Ranking, CVPR 2020",
    ),
    LossSpec(
        "focal",
        "bucketrank.detectors.criterion.scored:Focal",
        FocalSettings,
        title="focal loss",
        reference="Lin et al., Focal Loss for Dense Object Detection, ICCV 2017",
        gradient_note=_SCORE_NOTE,
    ),
    LossSpec(
        "ce",
        "bucketrank.detectors.criterion.scored:CrossEntropy",
        ScoreBasedSettings,
        title="cross-entropy",
        reference="Ren et al., Faster R-CNN, NeurIPS 2015",
        gradient_note=_SCORE_NOTE,
    ),
    LossSpec(
        "qfl",
        QUALITY_SCORED,
        QualityFocalSettings,
        title="Quality Focal Loss",
        reference="Li et al., Generalized Focal Loss, NeurIPS 2020",
        gradient_note=_SCORE_NOTE,
        function="bucketrank.losses:quality_focal_loss",
        box_weights="confidence",
    ),
    LossSpec(
        "vfl",
        QUALITY_SCORED,
        VarifocalSettings,
        title="Varifocal Loss",
        reference="Zhang et al., VarifocalNet, CVPR 2021",
        gradient_note=_SCORE_NOTE,
        function="bucketrank.losses:varifocal_loss",
        box_weights="iou",
    ),
    LossSpec(
        "bce",
        QUALITY_SCORED,
        ScoreBasedSettings,
        title="binary cross-entropy with IoU targets",
        reference="Feng et al., TOOD, ICCV 2021",
        gradient_note=_SCORE_NOTE,
        function="bucketrank.losses:soft_bce_loss",
        divisor="targets",
        box_weights="iou",
    ),
    LossSpec(
        "mal",
        QUALITY_SCORED,
        MALSettings,
        title="Matchability-Aware Loss",
        reference="Huang et al., DEIM, CVPR 2025",
        gradient_note=_SCORE_NOTE,
        function="bucketrank.losses:mal_loss",
    ),
    LossSpec(
        "iabce",
        QUALITY_SCORED,
        IoUAwareBCESettings,
        title="IoU-aware BCE",
        reference="Cai et al., Align-DETR, BMVC 2024",
        gradient_note=_SCORE_NOTE,
        function="bucketrank.losses:iou_aware_bce_loss",
    ),
    LossSpec(
        "rsq",
        "bucketrank.detectors.criterion.ranked:RankSortQuality",
        RankSortQualitySettings,
        title="Rank & Sort loss plus Quality Focal Loss",
        reference="the sum of rs and qfl",
        gradient_note=f"{_RANKING_NOTE} Quality Focal Loss also pulls each score towards its IoU.",
    ),
    LossSpec("own", None, title="own loss of the model"),
)
