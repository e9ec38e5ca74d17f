"""The built-in detectors: their specs, and the settings of detector, backbone and inputs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from bucketrank.errors import MAX_COMPARED, short_repr
from bucketrank.lazy import import_object
from bucketrank.settings.choices import MAX_PIXELS
from bucketrank.settings.fields import Settings, describe

BatchNorm = Literal["auto", "frozen", "trained"]
SWIN_NAMES = ("swin_tiny", "swin_large")
MAX_DIVISOR = 2**10


@dataclass(frozen=True)
class BackboneSettings(Settings):
    """Backbone name, weights and frozen layers.

    ``name`` may include timm's weights tag: ``resnet50.tv_in1k`` has torchvision's weights, as the published recipes
    do. A weights file has timm's layout or, for Swin, that of transformers (also as a folder). Pickles are never
    loaded. A frozen stage runs in evaluation mode, and the stem is frozen with the first stage. Frozen batch norms use
    their running statistics and never update them; their affine parameters are trained unless their stage is frozen.
    With ``checkpointing``, trained batch norms count each batch twice in their running statistics.
    """

    group: ClassVar[str] = "backbone"

    name: Annotated[str, "a timm model that supports features_only, swin_tiny or swin_large"] = "resnet50"
    weights: Annotated[str | None, "null (random), pretrained (ImageNet, downloaded) or a .safetensors file"] = None
    frozen_stages: Annotated[int | None, "number of frozen stages, 0 to 4 (null: 1 with weights, 0 without)"] = None
    batch_norm: Annotated[BatchNorm, "frozen, trained, or auto (frozen with weights, trained without)"] = "auto"
    deformable_groups: Annotated[int, "offset groups of deformable convolutions in stages 3 to 5; 0 for none"] = 0
    checkpointing: Annotated[bool, "recompute activations in the backward pass to save memory"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("weights", "null, pretrained or a path", holds=self.weights != "")
        stages = self.frozen_stages
        self.require("frozen_stages", "0 to 4 or null", holds=stages is None or stages in range(5))
        self.require_min(deformable_groups=0)
        possible = not self.deformable_groups or self.name not in SWIN_NAMES
        self.require("deformable_groups", f"0 for {self.name}", holds=possible)

    def check_name(self) -> None:
        """Raise ValueError unless the model exists. This is a separate check because timm imports torch."""
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
    """Base class of the input settings, with the checks they share."""

    image_mean: Any
    image_std: Any
    size_divisor: Any

    def require_valid_preparation(self) -> None:
        """Raise ValueError unless mean, standard deviation and divisor are valid."""
        divisor = self.size_divisor
        self.require("size_divisor", f"1 to {MAX_DIVISOR}", holds=divisor is None or 1 <= divisor <= MAX_DIVISOR)
        mean, std = self.image_mean or (), self.image_std or ()
        self.require("image_mean", "finite numbers", holds=all(map(math.isfinite, mean)))
        self.require("image_std", "finite numbers above 0", holds=all(math.isfinite(x) and x > 0 for x in std))


@dataclass(frozen=True)
class InputSettings(ImagePreparation):
    """Image preprocessing: resizing, normalisation and padding.

    A resized image has at most ``min_size`` x ``max_size`` pixels. The product must not exceed MAX_PIXELS.
    """

    group: ClassVar[str] = "inputs"

    min_size: Annotated[
        int | tuple[int, ...],
        "shorter side after resizing; of several, training draws one and evaluation uses the last",
    ] = 800
    size_range: Annotated[bool, "draw any size from the smallest to the largest min_size, not one of those listed"] = (
        False
    )
    max_size: Annotated[int, "maximum longer side after resizing"] = 1333
    image_mean: Annotated[tuple[float, float, float] | None, "mean to subtract (null: the backbone's)"] = None
    image_std: Annotated[
        tuple[float, float, float] | None, "standard deviation to divide by (null: the backbone's)"
    ] = None
    size_divisor: Annotated[int | None, "pad to a multiple of this (null: 32, and 1 in Co-DETR)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self._listed
        if not sizes or min(sizes) < 1 or self.max_size < max(sizes):
            raise ValueError(
                "inputs.min_size: expected one or more sizes between 1 and max_size, "
                f"got {self.min_size} with max_size {self.max_size}"
            )
        require_few_pixels(max(sizes), self.max_size)
        self.require_valid_preparation()

    @property
    def _listed(self) -> tuple[int, ...]:
        return (self.min_size,) if isinstance(self.min_size, int) else tuple(self.min_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All shorter sides that training draws from; evaluation uses the last.

        >>> InputSettings(min_size=(640, 643), size_range=True).sizes
        (640, 641, 642, 643)
        """
        sizes = self._listed
        return tuple(range(min(sizes), max(sizes) + 1)) if self.size_range else sizes


MAX_COUNT = 1_000_000  # upper bound for integer settings
POSITIVE_COUNTS = (  # integer settings of at least 1
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
FRACTIONS = (
    "nms",
    "soft_nms",
    "label_noise",
    "score_threshold",
    "positive_iou",
    "negative_iou",
    "stage_ious",
)  # settings from 0 to 1
ExtraLevels = Literal["c5", "p5_relu"]
RoIAlign = Literal["published", "torchvision"]


@dataclass(frozen=True)
class DetectorSettings(Settings):
    """Base class of the detector settings. Each detector adds its own in a subclass."""

    group: ClassVar[str] = "detector"

    name: Annotated[str, "detector name, or LIBRARY/MODEL for a torchvision or transformers model"] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting in describe(type(self)):
            value = getattr(self, setting.name)
            if type(value) is int:
                minimum = 1 if setting.name in POSITIVE_COUNTS else 0
                expected = f"a number from {minimum} to {MAX_COUNT:,}"
                self.require(setting.name, expected, holds=minimum <= value <= MAX_COUNT)
            if setting.name in FRACTIONS and value is not None:
                fractions = value if isinstance(value, tuple) else (value,)
                self.require(setting.name, "a number from 0 to 1", holds=all(0 <= each <= 1 for each in fractions))

    def without_weights(self) -> DetectorSettings:
        """Return the settings without weights, for a detector whose weights come from another file."""
        return self


@dataclass(frozen=True)
class DenseSettings(DetectorSettings):
    """Settings shared by the one-stage detectors."""

    channels: Annotated[int, "channels of the feature pyramid and the head"] = 256
    convs: Annotated[int, "convolutions in each tower of the head"] = 4
    candidates: Annotated[
        int, "highest class scores per level that enter NMS (PAA: anchors with the highest scores)"
    ] = 1000
    score_threshold: Annotated[float, "keep detections with a score above this before NMS"] = 0.0
    nms: Annotated[float, "IoU above which NMS removes the lower score"] = 0.6
    detections: Annotated[int, "maximum detections per image"] = 100


@dataclass(frozen=True)
class RetinaNetSettings(DenseSettings):
    """Settings of RetinaNet."""

    nms: Annotated[float, "IoU above which NMS removes the lower score"] = 0.5
    vote: Annotated[bool, "move each detection to the score-weighted mean of its overlapping boxes"] = False
    scales: Annotated[int | None, "anchor scales per octave (null: 2 with a ranking loss, 3 otherwise)"] = None
    positive_iou: Annotated[float, "minimum IoU of a positive anchor with its object"] = 0.5
    negative_iou: Annotated[float, "an anchor is negative if its IoU with every object is below this"] = 0.4
    extra_levels: Annotated[
        ExtraLevels, "P6 and P7 by convolutions on C5 (the recipes), or on P5 with a ReLU between (torchvision)"
    ] = "c5"

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"at most detector.positive_iou, {self.positive_iou}"
        self.require("negative_iou", expected, holds=self.negative_iou <= self.positive_iou)


@dataclass(frozen=True)
class ATSSSettings(DenseSettings):
    """Settings of ATSS and PAA."""

    anchors: Annotated[int | None, "anchors per location (null: 3 with a ranking loss, 1 otherwise)"] = None
    topk: Annotated[int, "anchors per level that are candidates for an object"] = 9
    quality_branch: Annotated[
        bool | None, "multiply scores by a predicted quality (null: only with a loss that does not see the IoU)"
    ] = None
    vote: Annotated[
        bool | None, "move each detection to the score-weighted mean of its overlapping boxes (null: as published)"
    ] = None


@dataclass(frozen=True)
class RCNNSettings(DetectorSettings):
    """Settings of Faster R-CNN, shared by all two-stage detectors."""

    channels: Annotated[int, "channels of the feature pyramid and the RPN"] = 256
    hidden: Annotated[int, "width of the two hidden layers of the box head"] = 1024
    proposals: Annotated[int, "proposals per image in training"] = 1000
    proposal_candidates: Annotated[int, "highest-scoring anchors per level that become candidates in training"] = 2000
    test_proposals: Annotated[int, "proposals per image in evaluation"] = 1000
    roi_align: Annotated[
        RoIAlign,
        "RoIAlign, mask targets and mask pasting: published (half-pixel aligned, adaptive sampling), or torchvision's",
    ] = "published"
    score_threshold: Annotated[float, "keep detections with a score above this before NMS"] = 0.0
    nms: Annotated[float, "IoU above which NMS removes the lower score"] = 0.5
    detections: Annotated[int, "maximum detections per image"] = 100


@dataclass(frozen=True)
class MaskRCNNSettings(RCNNSettings):
    """Settings of Mask R-CNN."""

    mask_rois: Annotated[
        int | None, "maximum positives per batch in the mask loss (null: 200 with a ranking loss, else all)"
    ] = None
    mask_loss: Annotated[Literal["dice", "bce"] | None, "mask loss (null: dice with a ranking loss, bce otherwise)"] = (
        None
    )
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
    stage_ious: Annotated[tuple[float, ...], "minimum IoU of a positive proposal, for each stage"] = (0.5, 0.6, 0.7)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("stage_ious", "1 to 3 stages", holds=1 <= len(self.stage_ious) <= 3)


@dataclass(frozen=True)
class CollaborativeSettings(DetectorSettings):
    """Settings shared by Co-DETR and Co-DINO."""

    auxiliary: Annotated[tuple[str, ...], "auxiliary heads: any of faster_rcnn and atss"] = ("faster_rcnn", "atss")
    levels: Annotated[int, "feature maps: 4 (strides 8 to 64) or 5 (strides 4 to 64)"] = 4
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
        float | None, "class weight in Hungarian matching (null: 4 with a ranking loss, 2 otherwise)"
    ] = None
    auxiliary_weight: Annotated[
        float | None, "weight of the auxiliary losses (null: 5 with a ranking loss, 12 otherwise)"
    ] = None
    sampling: Annotated[bool, "focal loss: train the auxiliary Faster R-CNN with cross-entropy on a sample"] = True
    auxiliary_queries: Annotated[int, "maximum decoder queries per image from each auxiliary head"] = 300
    hidden: Annotated[int, "width of the two hidden layers of the auxiliary box head"] = 1024
    proposals: Annotated[int, "proposals per image of the auxiliary Faster R-CNN"] = 1000
    proposal_candidates: Annotated[int, "highest-scoring anchors per level that become its candidates"] = 4000
    topk: Annotated[int, "anchors per level that are candidates for an object in the auxiliary ATSS head"] = 9
    detections: Annotated[int, "detections per image"] = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("levels", "4 or 5", holds=self.levels in (4, 5))
        self.require_min(queries=1, auxiliary_queries=1)
        self.require_finite("class_cost", "auxiliary_weight")


@dataclass(frozen=True)
class CoDETRSettings(CollaborativeSettings):
    """Settings of Co-DETR. Trained with RS loss, it is BRS-DETR."""

    published: Annotated[
        bool,
        "as in the published code: the proposals have a logit per class, a matched box without overlap is a negative, "
        "and one number marks the queries of an auxiliary head",
    ] = False


@dataclass(frozen=True)
class CoDINOSettings(CollaborativeSettings):
    """Settings of Co-DINO."""

    levels: Annotated[int, "feature maps: 4 (strides 8 to 64) or 5 (strides 4 to 64)"] = 5
    queries: Annotated[int, "object queries of the decoder"] = 900
    sampling: Annotated[bool, "score-based losses: train the auxiliary Faster R-CNN with cross-entropy on a sample"] = (
        True
    )
    denoising: Annotated[int, "denoising queries per image, in groups of twice the objects (0: none)"] = 100
    label_noise: Annotated[float, "fraction of denoising queries with a random class"] = 0.25
    box_noise: Annotated[float, "noise of denoising boxes: 1 moves a corner by up to half of the box's side"] = 1.0
    soft_nms: Annotated[float | None, "IoU from which soft-NMS lowers the lower score of two boxes (null: none)"] = 0.8
    detections: Annotated[int, "detections per image"] = 300

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_finite("box_noise")


@dataclass(frozen=True)
class DetectorSpec:
    """The declaration of a detector, which is read without importing it.

    ``detector`` is the class (a subclass of ``bucketrank.detectors.Detector``) or its import path,
    ``"package.module:Class"``. ``losses`` names the losses it can be trained with; None means all with a criterion
    except ``excluded_losses``. ``backbone`` is False if the model has its own backbone, without settings.
    """

    name: str  # name in recipes and flags
    detector: str | Callable[..., Any]  # class or import path
    settings: type[DetectorSettings] = DetectorSettings  # settings class
    title: str = ""  # name shown to readers
    reference: str = ""  # the publication
    losses: tuple[str, ...] | None = None  # loss names; None for all with a criterion
    excluded_losses: tuple[str, ...] = ()  # losses it cannot be trained with
    backbone: bool = True  # whether it takes backbone settings
    inputs: type[Settings] = InputSettings  # class of the input settings

    @property
    def groups(self) -> tuple[type[Settings], ...]:
        """The setting groups of the detector, without the loss."""
        return (self.settings, *((BackboneSettings,) if self.backbone else ()), self.inputs)

    def load(self) -> Any:
        """Import the detector class."""
        return import_object(self.detector)


BUILT_IN_DETECTORS = (
    DetectorSpec(
        "faster_rcnn",
        "bucketrank.detectors.rcnn:FasterRCNN",
        RCNNSettings,
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
        ATSSSettings,
        title="PAA",
        reference="Kim & Lee, ECCV 2020",
    ),
    DetectorSpec(
        "co_detr",
        "bucketrank.detectors.co_detr.model:CoDETR",
        CoDETRSettings,
        title="Co-DETR",
        reference="Zong et al., DETRs with Collaborative Hybrid Assignments Training, ICCV 2023",
        excluded_losses=("alrp", "dr", "ce"),
    ),
    DetectorSpec(
        "co_dino",
        "bucketrank.detectors.co_detr.dino:CoDINO",
        CoDINOSettings,
        title="Co-DINO",
        reference="Zong et al., DETRs with Collaborative Hybrid Assignments Training, ICCV 2023; "
        "Zhang et al., DINO, ICLR 2023",
        excluded_losses=("alrp", "dr", "ce"),
    ),
)
