"""The detectors of the package, each declared once: name, title, reference, settings and the class that builds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from bucketrank.catalogue.fields import Settings, describe
from bucketrank.catalogue.importing import import_object
from bucketrank.catalogue.model_settings import BackboneSettings, InputSettings

MAX_COUNT = 1_000_000  # of anything a detector has a number of
NEVER_ZERO = (
    "channels",
    "hidden",
    "candidates",
    "detections",
    "proposals",
    "test_proposals",
    "topk",
    "anchors",
    "scales",
)
SHARES = ("nms", "score_threshold", "positive_iou", "negative_iou", "stage_ious")  # settings from 0 to 1
ExtraLevels = Literal["c5", "p5_relu"]
RoIAlign = Literal["published", "torchvision"]


@dataclass(frozen=True)
class DetectorSettings(Settings):
    """The name of a detector; each detector adds its own settings in a subclass."""

    group: ClassVar[str] = "detector"
    # Settings that a run fills in when it starts, see Detector.complete_settings.
    filled_by_run: ClassVar[tuple[str, ...]] = ()

    name: Annotated[str, "the detector, or LIBRARY/MODEL for one of torchvision or transformers"] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting in describe(type(self)):
            value = getattr(self, setting.name)
            if type(value) is int:  # the whole numbers of a detector all count something
                least = 1 if setting.name in NEVER_ZERO else 0
                expected = f"a number from {least} to {MAX_COUNT:,}"
                self.require(setting.name, expected, holds=least <= value <= MAX_COUNT)
            if setting.name in SHARES and value is not None:
                shares = value if isinstance(value, tuple) else (value,)
                self.require(setting.name, "a number from 0 to 1", holds=all(0 <= share <= 1 for share in shares))

    def without_weights(self) -> DetectorSettings:
        """Return the settings for a detector whose weights come from elsewhere: those named here are not read."""
        return self


@dataclass(frozen=True)
class DenseSettings(DetectorSettings):
    """Settings that the one-stage detectors share."""

    channels: Annotated[int, "channels of the feature pyramid and the head"] = 256
    convs: Annotated[int, "convolutions in each tower of the head"] = 4
    candidates: Annotated[
        int, "highest class scores per level that enter NMS (PAA: anchors with the highest scores)"
    ] = 1000
    score_threshold: Annotated[float, "keep detections with a score above this before NMS"] = 0.0
    nms: Annotated[float, "IoU above which NMS removes the lower score"] = 0.6
    detections: Annotated[int, "upper limit of detections per image"] = 100


@dataclass(frozen=True)
class RetinaNetSettings(DenseSettings):
    """Settings of RetinaNet."""

    nms: Annotated[float, "IoU above which NMS removes the lower score"] = 0.5
    vote: Annotated[bool, "move each detection to the score-weighted mean of its overlapping boxes"] = False
    scales: Annotated[int | None, "anchor scales per octave (null: 2 with a ranking loss, 3 otherwise)"] = None
    positive_iou: Annotated[float, "IoU with an object from which an anchor is positive"] = 0.5
    negative_iou: Annotated[float, "IoU with every object below which an anchor is negative"] = 0.4
    extra_levels: Annotated[
        ExtraLevels, "P6 and P7 by convolutions on C5 (the recipes), or on P5 with a ReLU between (torchvision)"
    ] = "c5"

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"at most detector.positive_iou, {self.positive_iou}"
        self.require("negative_iou", expected, holds=self.negative_iou <= self.positive_iou)


@dataclass(frozen=True)
class ATSSSettings(DenseSettings):
    """Settings of ATSS."""

    anchors: Annotated[int | None, "anchors per location (null: 3 with a ranking loss, 1 otherwise)"] = None
    topk: Annotated[int, "anchors per level that are candidates for an object"] = 9
    quality_branch: Annotated[
        bool | None, "multiply scores by a predicted quality (null: only with a loss that does not see the IoU)"
    ] = None
    vote: Annotated[
        bool | None, "move each detection to the score-weighted mean of its overlapping boxes (null: as published)"
    ] = None


@dataclass(frozen=True)
class PAASettings(ATSSSettings):
    """Settings of PAA."""


@dataclass(frozen=True)
class RCNNSettings(DetectorSettings):
    """Settings that the two-stage detectors share."""

    channels: Annotated[int, "channels of the feature pyramid and the RPN"] = 256
    hidden: Annotated[int, "width of the two hidden layers of a box head"] = 1024
    proposals: Annotated[int, "proposals per image in training"] = 1000
    proposal_candidates: Annotated[int, "highest-scoring anchors per level that become candidates in training"] = 2000
    test_proposals: Annotated[int, "proposals per image in evaluation"] = 1000
    roi_align: Annotated[
        RoIAlign,
        "RoIAlign, mask targets and mask pasting: published (half-pixel aligned, adaptive sampling), or torchvision's",
    ] = "published"
    score_threshold: Annotated[float, "keep detections with a score above this before NMS"] = 0.0
    nms: Annotated[float, "IoU above which NMS removes the lower score"] = 0.5
    detections: Annotated[int, "upper limit of detections per image"] = 100


@dataclass(frozen=True)
class FasterRCNNSettings(RCNNSettings):
    """Settings of Faster R-CNN."""


@dataclass(frozen=True)
class MaskRCNNSettings(FasterRCNNSettings):
    """Settings of Mask R-CNN."""

    mask_rois: Annotated[
        int | None, "upper limit of positives per batch that train masks (null: 200 with a ranking loss, else all)"
    ] = None
    mask_loss: Annotated[
        Literal["dice", "bce"] | None, "loss of the masks (null: dice with a ranking loss, bce otherwise)"
    ] = None
    mask_balance: Annotated[
        bool | None,
        "scale the mask loss to the value of the box head's classification loss (null: only with rs and rsq)",
    ] = None
    mask_confidence: Annotated[
        bool | None, "weight the mask loss of each positive by its highest class score (null: only with a ranking loss)"
    ] = None
    mask_weight: Annotated[
        float | None, "fixed weight of the mask loss, instead of mask_balance (null: 1 where it is not balanced)"
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("mask_weight")
        self.require(
            "mask_weight",
            "null with detector.mask_balance true",
            holds=not self.mask_balance or self.mask_weight is None,
        )


@dataclass(frozen=True)
class CascadeRCNNSettings(RCNNSettings):
    """Settings of Cascade R-CNN."""

    proposals: Annotated[int, "proposals per image in training"] = 2000
    stage_ious: Annotated[tuple[float, ...], "IoU from which a proposal is positive, for each stage"] = (0.5, 0.6, 0.7)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("stage_ious", "1 to 3 stages", holds=1 <= len(self.stage_ious) <= 3)


@dataclass(frozen=True)
class CoDETRSettings(DetectorSettings):
    """Settings of Co-DETR, which is BRS-DETR when it is trained with RS loss."""

    auxiliary: Annotated[tuple[str, ...], "auxiliary heads: any of faster_rcnn and atss"] = ("faster_rcnn", "atss")
    channels: Annotated[int, "width of the transformer"] = 256
    dropout: Annotated[float, "dropout in the transformer"] = 0.0
    queries: Annotated[int, "object queries of the decoder"] = 300
    encoder_layers: Annotated[int, "layers of the encoder"] = 6
    decoder_layers: Annotated[int, "layers of the decoder"] = 6
    heads: Annotated[int, "attention heads"] = 8
    points: Annotated[int, "sampling points per attention head and level"] = 4
    feedforward: Annotated[int, "width of the feed-forward layers"] = 2048
    transformer_checkpointing: Annotated[bool, "recompute the transformer's activations to save memory"] = False
    class_cost: Annotated[
        float | None, "weight of the class in Hungarian matching (null: 4 with a ranking loss, 2 otherwise)"
    ] = None
    auxiliary_weight: Annotated[
        float | None, "weight of the auxiliary losses (null: 5 with a ranking loss, 12 otherwise)"
    ] = None
    sampling: Annotated[bool, "focal loss: train the auxiliary Faster R-CNN with cross-entropy on a sample"] = True
    published: Annotated[
        bool,
        "as in the published code: the proposals have a logit per class, a matched box without overlap is a negative, "
        "and one number marks the queries of an auxiliary head",
    ] = False
    auxiliary_queries: Annotated[int, "upper limit of decoder queries per image from each auxiliary head"] = 300
    hidden: Annotated[int, "width of the two hidden layers of the auxiliary box head"] = 1024
    proposals: Annotated[int, "proposals per image of the auxiliary Faster R-CNN"] = 1000
    proposal_candidates: Annotated[int, "highest-scoring anchors per level that become its candidates"] = 4000
    topk: Annotated[int, "anchors per level that are candidates for an object in the auxiliary ATSS head"] = 9
    detections: Annotated[int, "detections per image"] = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("queries", "at least 1", holds=self.queries >= 1)
        self.require("auxiliary_queries", "at least 1", holds=self.auxiliary_queries >= 1)


@dataclass(frozen=True)
class DetectorSpec:
    """Everything the package has to know about a detector before it is imported.

    ``detector`` is the class (a subclass of ``bucketrank.detectors.Detector``) or its import path,
    ``"package.module:Class"``. ``losses`` names the losses it can be trained with; None means all with a criterion.
    ``backbone`` is False if the backbone is part of the model and takes no settings. ``inputs`` are the settings of its
    images.
    """

    name: str  # name in recipes and flags
    detector: str | Callable[..., Any]  # class or import path
    settings: type[DetectorSettings] = DetectorSettings  # class of the settings
    title: str = ""  # name shown to readers
    reference: str = ""  # the publication
    losses: tuple[str, ...] | None = None  # names of its losses; None for all with a criterion
    backbone: bool = True  # whether it takes settings of a backbone
    inputs: type[Settings] = InputSettings  # class of the settings of its images

    @property
    def groups(self) -> tuple[type[Settings], ...]:
        """The groups of settings that the detector takes, besides its loss."""
        return (self.settings, *((BackboneSettings,) if self.backbone else ()), self.inputs)

    @property
    def heading(self) -> str:
        """The title, or the name of a detector without one."""
        return self.title or self.name

    def load(self) -> Any:
        """Import the class of the detector."""
        return import_object(self.detector)


BUILT_IN_DETECTORS = (
    DetectorSpec(
        "faster_rcnn",
        "bucketrank.detectors.rcnn:FasterRCNN",
        FasterRCNNSettings,
        title="Faster R-CNN",
        reference="Ren et al., NeurIPS 2015",
    ),
    DetectorSpec(
        "mask_rcnn",
        "bucketrank.detectors.mask_rcnn:MaskRCNN",
        MaskRCNNSettings,
        title="Mask R-CNN",
        reference="He et al., ICCV 2017",
    ),
    DetectorSpec(
        "cascade_rcnn",
        "bucketrank.detectors.rcnn:CascadeRCNN",
        CascadeRCNNSettings,
        title="Cascade R-CNN",
        reference="Cai & Vasconcelos, CVPR 2018",
    ),
    DetectorSpec(
        "retinanet",
        "bucketrank.detectors.retinanet:RetinaNet",
        RetinaNetSettings,
        title="RetinaNet",
        reference="Lin et al., ICCV 2017",
    ),
    DetectorSpec(
        "atss",
        "bucketrank.detectors.atss:ATSS",
        ATSSSettings,
        title="ATSS",
        reference="Zhang et al., CVPR 2020",
    ),
    DetectorSpec(
        "paa",
        "bucketrank.detectors.paa:PAA",
        PAASettings,
        title="PAA",
        reference="Kim & Lee, ECCV 2020",
    ),
    DetectorSpec(
        "co_detr",
        "bucketrank.detectors.co_detr.model:CoDETR",
        CoDETRSettings,
        title="Co-DETR",
        reference="Zong et al., DETRs with Collaborative Hybrid Assignments Training, ICCV 2023",
        losses=("rs", "ap", "focal", "qfl", "vfl", "bce", "mal", "iabce", "rsq"),
    ),
)
