"""The losses of the package, each declared once: name, title, reference, settings and the class that computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from bucketrank.catalogue.fields import Settings
from bucketrank.catalogue.importing import import_object
from bucketrank.choices import ALRPMethod, Method

RankingScope = Literal["batch", "image", "global"]
BoxLoss = Literal["giou", "l1", "smooth_l1"]


AnyLossSettings = TypeVar("AnyLossSettings", bound="LossSettings")


@dataclass(frozen=True)
class LossSettings(Settings):
    """The settings that every loss has; each loss adds its own in a subclass.

    ``ranking_scope`` says what one ranking covers: ``"batch"``, all images of the process (the paper's choice);
    ``"image"``, each image alone, averaged over the images with objects; ``"global"``, the images of all processes, so
    that the loss does not depend on how a batch is split.
    """

    group: ClassVar[str] = "loss"
    # Settings that a run fills in when it starts, see :meth:`for_run`.
    filled_by_run: ClassVar[tuple[str, ...]] = ()

    name: Annotated[str, "the loss that trains the detector"] = "rs"
    ranking_scope: Annotated[RankingScope, "what one ranking covers: batch, image, or global (all processes)"] = "batch"
    box_loss: Annotated[BoxLoss | None, "loss of the boxes (null: as published for this loss and detector)"] = None
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

    def for_run(self: AnyLossSettings, *, batches_per_epoch: int) -> AnyLossSettings:  # noqa: ARG002 (for subclasses)
        """Return the settings with everything filled in that depends on the data set."""
        return self

    def sampled(self) -> LossSettings:
        """Return the loss for heads that train on a balanced sample of their candidates where this loss allows it."""
        return self


@dataclass(frozen=True)
class RankingSettings(LossSettings):
    """Settings of the losses that compare every positive with every entry through a smoothed step."""

    default_delta: ClassVar[float] = 1.0

    method: Annotated[Method, "exact, bucketed (the paper's approximation) or pairwise (the definition)"] = "exact"
    delta: Annotated[float | None, "half the width of the ramp of the smoothed step (null: 1, for rs 0.5)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("delta")

    @property
    def effective_delta(self) -> float:
        """The delta in use: the one that is set, or the loss's default."""
        return self.default_delta if self.delta is None else self.delta


@dataclass(frozen=True)
class RankSortSettings(RankingSettings):
    """Settings of RS loss."""

    default_delta: ClassVar[float] = 0.5


@dataclass(frozen=True)
class APSettings(RankingSettings):
    """Settings of AP loss."""

    name: Annotated[str, "the loss that trains the detector"] = "ap"
    interpolate: Annotated[bool, "AP: the original, interpolated loss"] = False


@dataclass(frozen=True)
class ALRPSettings(RankingSettings):
    """Settings of aLRP loss."""

    filled_by_run: ClassVar[tuple[str, ...]] = ("balance_period",)

    name: Annotated[str, "the loss that trains the detector"] = "alrp"
    method: Annotated[ALRPMethod, "exact or pairwise (the definition)"] = "exact"
    balance_period: Annotated[int | None, "aLRP: iterations between updates of the box weight (null: one epoch)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("box_weight", "box_balance", "box_confidence"):
            self.require(name, "null: aLRP loss balances and ranks its boxes itself", holds=getattr(self, name) is None)
        period = self.balance_period
        self.require("balance_period", "at least 1 or null", holds=period is None or period >= 1)

    def for_run(self, *, batches_per_epoch: int) -> ALRPSettings:
        return self if self.balance_period is not None else replace(self, balance_period=batches_per_epoch)


@dataclass(frozen=True)
class DRSettings(LossSettings):
    """Settings of DR loss."""

    name: Annotated[str, "the loss that trains the detector"] = "dr"


@dataclass(frozen=True)
class ScoreBasedSettings(LossSettings):
    """Settings of the losses that look at one score at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "batch or global, because a score-based loss ranks nothing"
        self.require("ranking_scope", expected, holds=self.ranking_scope != "image")


@dataclass(frozen=True)
class FocalSettings(ScoreBasedSettings):
    """Settings of focal loss."""

    name: Annotated[str, "the loss that trains the detector"] = "focal"
    focal_alpha: Annotated[float, "focal: weight of the positives, 1 - alpha is that of the negatives"] = 0.25
    focal_gamma: Annotated[float, "focal: exponent that lowers the weight of easy entries"] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("focal_alpha", "focal_gamma")

    def sampled(self) -> LossSettings:
        shared = {field.name: getattr(self, field.name) for field in fields(LossSettings) if field.name != "name"}
        return CrossEntropySettings(**shared)


@dataclass(frozen=True)
class CrossEntropySettings(ScoreBasedSettings):
    """Settings of cross-entropy."""

    name: Annotated[str, "the loss that trains the detector"] = "ce"


@dataclass(frozen=True)
class OwnSettings(LossSettings):
    """Settings of the loss that a model of another library brings along. It takes none of the shared settings."""

    name: Annotated[str, "the loss that trains the detector"] = "own"


@dataclass(frozen=True)
class QualityFocalSettings(ScoreBasedSettings):
    """Settings of Quality Focal Loss."""

    name: Annotated[str, "the loss that trains the detector"] = "qfl"
    quality_beta: Annotated[float, "qfl, rsq: exponent of the distance between score and IoU"] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("quality_beta")


@dataclass(frozen=True)
class VarifocalSettings(ScoreBasedSettings):
    """Settings of Varifocal Loss."""

    name: Annotated[str, "the loss that trains the detector"] = "vfl"
    varifocal_alpha: Annotated[float, "vfl: weight of the negatives"] = 0.75
    varifocal_gamma: Annotated[float, "vfl: exponent of a negative's score in its weight"] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("varifocal_alpha", "varifocal_gamma")


@dataclass(frozen=True)
class SoftBCESettings(ScoreBasedSettings):
    """Settings of binary cross-entropy with IoU targets."""

    name: Annotated[str, "the loss that trains the detector"] = "bce"


@dataclass(frozen=True)
class MALSettings(ScoreBasedSettings):
    """Settings of Matchability-Aware Loss."""

    name: Annotated[str, "the loss that trains the detector"] = "mal"
    mal_gamma: Annotated[float, "mal: exponent of a positive's IoU and of a negative's score"] = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("mal_gamma")


@dataclass(frozen=True)
class IoUAwareBCESettings(ScoreBasedSettings):
    """Settings of IoU-aware BCE."""

    name: Annotated[str, "the loss that trains the detector"] = "iabce"
    iabce_alpha: Annotated[
        float, "iabce: exponent of the score in a positive's target, 1 - alpha is that of the IoU"
    ] = 0.25
    iabce_gamma: Annotated[float, "iabce: exponent of a negative's score in its weight"] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("iabce_alpha", "iabce_gamma")
        self.require("iabce_alpha", "at most 1", holds=self.iabce_alpha <= 1)


@dataclass(frozen=True)
class RankSortQualitySettings(RankSortSettings):
    """Settings of the sum of RS loss and Quality Focal Loss."""

    name: Annotated[str, "the loss that trains the detector"] = "rsq"
    quality_beta: Annotated[float, "qfl, rsq: exponent of the distance between score and IoU"] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("quality_beta")


@dataclass(frozen=True)
class LossSpec:
    """Everything the package has to know about a loss before it is imported.

    ``criterion`` is the class (a subclass of ``bucketrank.detectors.criterion.Criterion``) or its import path,
    ``"package.module:Class"``; None if the loss is part of the model. ``gradient_note`` tells readers of a report
    how to read the loss's gradients.
    """

    name: str  # name in recipes and flags
    criterion: str | Callable[..., Any] | None  # class or import path; None if part of the model
    settings: type[LossSettings] = LossSettings  # class of the settings
    title: str = ""  # name shown to readers
    reference: str = ""  # the publication
    gradient_note: str = ""  # for readers of a report

    @property
    def heading(self) -> str:
        """The title, or the name of a loss without one."""
        return self.title or self.name

    def load(self) -> Any:
        """Import the class that computes the loss; ValueError if the loss is part of the model."""
        if self.criterion is None:
            raise ValueError(f"loss.name: expected a loss with a criterion, got {self.name!r}, part of a model")
        return import_object(self.criterion)


_RANKING_NOTE = (
    "A positive is raised because of the negatives ranked above it, and these negatives are lowered by the same total. "
    "Entries that are in the right order by more than delta have no gradient."
)
_SCORE_NOTE = "This loss treats each score on its own; the rank has no influence."

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
        DRSettings,
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
        CrossEntropySettings,
        title="cross-entropy",
        reference="Ren et al., Faster R-CNN, NeurIPS 2015",
        gradient_note=_SCORE_NOTE,
    ),
    LossSpec(
        "qfl",
        "bucketrank.detectors.criterion.scored:QualityFocal",
        QualityFocalSettings,
        title="Quality Focal Loss",
        reference="Li et al., Generalized Focal Loss, NeurIPS 2020",
        gradient_note=_SCORE_NOTE,
    ),
    LossSpec(
        "vfl",
        "bucketrank.detectors.criterion.scored:Varifocal",
        VarifocalSettings,
        title="Varifocal Loss",
        reference="Zhang et al., VarifocalNet, CVPR 2021",
        gradient_note=_SCORE_NOTE,
    ),
    LossSpec(
        "bce",
        "bucketrank.detectors.criterion.scored:SoftBCE",
        SoftBCESettings,
        title="binary cross-entropy with IoU targets",
        reference="Feng et al., TOOD, ICCV 2021",
        gradient_note=_SCORE_NOTE,
    ),
    LossSpec(
        "mal",
        "bucketrank.detectors.criterion.scored:MAL",
        MALSettings,
        title="Matchability-Aware Loss",
        reference="Huang et al., DEIM, CVPR 2025",
        gradient_note=_SCORE_NOTE,
    ),
    LossSpec(
        "iabce",
        "bucketrank.detectors.criterion.scored:IoUAwareBCE",
        IoUAwareBCESettings,
        title="IoU-aware BCE",
        reference="Cai et al., Align-DETR, BMVC 2024",
        gradient_note=_SCORE_NOTE,
    ),
    LossSpec(
        "rsq",
        "bucketrank.detectors.criterion.ranked:RankSortQuality",
        RankSortQualitySettings,
        title="Rank & Sort loss plus Quality Focal Loss",
        reference="the sum of rs and qfl",
        gradient_note=f"{_RANKING_NOTE} Quality Focal Loss adds a pull of each score towards its IoU.",
    ),
    LossSpec("own", None, OwnSettings, title="own loss of the model"),
)
