"""The detectors of other libraries, each library declared once: torchvision's and transformers'.

The name of such a detector is the library and its model, like ``torchvision/retinanet_resnet50_fpn_v2``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from bucketrank.catalogue.detector_specs import DetectorSettings, DetectorSpec
from bucketrank.catalogue.model_settings import BatchNorm, ImagePreparation, require_few_pixels
from bucketrank.suggestions import nearest, short_repr

LIBRARY_LOSSES = ("own", "rs", "ap")


@dataclass(frozen=True)
class LibraryInputSettings(ImagePreparation):
    """The preparation of images for a model of another library; null stands for the model's own value."""

    group: ClassVar[str] = "inputs"

    min_size: Annotated[
        int | tuple[int, ...] | None,
        "shorter side after resizing, or the side of square inputs (null: the model's); of several, training draws one "
        "and evaluation uses the last",
    ] = None
    max_size: Annotated[int | None, "upper limit of the longer side after resizing (null: the model's)"] = None
    image_mean: Annotated[tuple[float, float, float] | None, "mean to subtract (null: the model's)"] = None
    image_std: Annotated[tuple[float, float, float] | None, "deviation to divide by (null: the model's)"] = None
    size_divisor: Annotated[int | None, "pad to a multiple of this (null: the model's)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.sizes
        self.require("min_size", "sizes of at least 1", holds=sizes is None or (sizes != () and min(sizes) >= 1))
        self.require("max_size", "at least 1", holds=self.max_size is None or self.max_size >= 1)
        if sizes is not None and self.max_size is not None and max(sizes) > self.max_size:
            raise ValueError(
                f"inputs.min_size: expected sizes up to max_size, got {self.min_size} with max_size {self.max_size}"
            )
        if sizes is not None:
            require_few_pixels(max(sizes), self.max_size or max(sizes))
        self.require_valid_preparation()

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """``min_size`` as a tuple; None for the model's own."""
        return (self.min_size,) if isinstance(self.min_size, int) else self.min_size


@dataclass(frozen=True)
class LibrarySettings(DetectorSettings):
    """Settings of a detector of another library. ``model`` is the part of its name after the library."""

    @property
    def model(self) -> str:
        """The name of the model in its library."""
        return self.name.partition("/")[2]


@dataclass(frozen=True)
class BackboneLayers:
    """The layers of a torchvision backbone, and torchvision's choice of trained layers and batch norms with weights."""

    total: int = 5
    trained: int = 3
    batch_norm: BatchNorm = "trained"


# torchvision's detectors, except Keypoint R-CNN: our data sets have no keypoints.
TORCHVISION_MODELS = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": BackboneLayers(6, 3, "frozen"),
    "fasterrcnn_mobilenet_v3_large_fpn": BackboneLayers(6, 3, "frozen"),
    "fasterrcnn_resnet50_fpn": BackboneLayers(5, 3, "frozen"),
    "fasterrcnn_resnet50_fpn_v2": BackboneLayers(5, 3),
    "fcos_resnet50_fpn": BackboneLayers(5, 3, "frozen"),
    "maskrcnn_resnet50_fpn": BackboneLayers(5, 3, "frozen"),
    "maskrcnn_resnet50_fpn_v2": BackboneLayers(5, 3),
    "retinanet_resnet50_fpn": BackboneLayers(5, 3, "frozen"),
    "retinanet_resnet50_fpn_v2": BackboneLayers(5, 3),
    "ssd300_vgg16": BackboneLayers(5, 4),
    "ssdlite320_mobilenet_v3_large": BackboneLayers(6, 6),
}


@dataclass(frozen=True)
class TorchvisionSettings(LibrarySettings):
    """Settings of torchvision's detectors.

    A weights file has torchvision's names of tensors. Layers whose shape depends on the number of classes keep their
    initial values if that number differs. Pickles are read only as torchvision's own download, without code in them.
    """

    filled_by_run: ClassVar[tuple[str, ...]] = ("score_threshold",)

    weights: Annotated[str | None, "null (random), coco (torchvision's, downloaded) or a .safetensors file"] = None
    trainable_layers: Annotated[
        int | None, "layers of the backbone that are trained, from its end (null: torchvision's choice; all if random)"
    ] = None
    batch_norm: Annotated[BatchNorm, "frozen, trained, or auto (torchvision's choice; trained without weights)"] = (
        "auto"
    )
    proposals: Annotated[int | None, "R-CNNs: proposals per image in training (null: torchvision's, 2000)"] = None
    score_threshold: Annotated[
        float | None, "drop detections below this before NMS (null: 0 with a ranking loss, else torchvision's)"
    ] = None
    nms: Annotated[float | None, "IoU above which NMS removes the lower score (null: torchvision's)"] = None
    detections: Annotated[int | None, "upper limit of detections per image (null: torchvision's)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in TORCHVISION_MODELS:
            known = [f"torchvision/{model}" for model in TORCHVISION_MODELS]
            raise ValueError(
                f"detector.name: expected one of {', '.join(known)}, got {short_repr(self.name)}; "
                + nearest(self.name, known)
            )
        self.require("weights", "null, coco or a path", holds=self.weights != "")
        total, trained = TORCHVISION_MODELS[self.model].total, self.trainable_layers
        self.require("trainable_layers", f"0 to {total} or null", holds=trained is None or trained <= total)
        r_cnn = "rcnn" in self.model
        self.require("proposals", f"null for {self.model}", holds=self.proposals is None or r_cnn)

    def without_weights(self) -> TorchvisionSettings:
        if self.weights is None:
            return self
        layers = TORCHVISION_MODELS[self.model]
        return replace(
            self,
            weights=None,
            trainable_layers=layers.trained if self.trainable_layers is None else self.trainable_layers,
            batch_norm=layers.batch_norm if self.batch_norm == "auto" else self.batch_norm,
        )


@dataclass(frozen=True)
class TransformersSettings(LibrarySettings):
    """Settings of the detection transformers of transformers, by a folder or a name on the Hugging Face hub.

    Only safetensors are read. Layers whose shape depends on the number of classes start anew if that number differs. A
    run stores ``config`` and ``processor``, so that its weights files need neither the folder nor the hub.
    """

    filled_by_run: ClassVar[tuple[str, ...]] = ("config", "processor")

    weights: Annotated[
        Literal["pretrained"] | None, "pretrained (those of the folder or hub name) or null (random)"
    ] = "pretrained"
    freeze_backbone: Annotated[bool, "do not train the backbone"] = False
    class_cost: Annotated[
        float | None, "weight of the class in Hungarian matching with a ranking loss (null: the model's)"
    ] = None
    score_threshold: Annotated[float, "keep detections with a score above this"] = 0.0
    detections: Annotated[int, "upper limit of detections per image"] = 100
    config: Annotated[str | None, "the model's config.json as a text (null: that of the folder or hub name)"] = None
    processor: Annotated[str | None, "the model's preprocessor_config.json as a text (filled in with config)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("name", "transformers/FOLDER or transformers/HUB_NAME", holds=self.model != "")
        cost = self.class_cost
        self.require("class_cost", "a number of at least 0", holds=cost is None or (math.isfinite(cost) and cost >= 0))

    def without_weights(self) -> TransformersSettings:
        return replace(self, weights=None)


@dataclass(frozen=True)
class LibrarySpec(DetectorSpec):
    """A library of detectors. ``example`` is the name of one of its models, for messages."""

    example: str = ""  # name of one of its models

    def load(self) -> Any:
        """Import the class that holds a model of the library; ValueError if the library or its version is missing."""
        try:
            return super().load()
        except ImportError as error:
            raise ValueError(f"detector.name: {self.name}'s detectors cannot be used: {error}") from error


LIBRARIES = {
    spec.name: spec
    for spec in (
        LibrarySpec(
            "torchvision",
            "bucketrank.detectors.torchvision:TorchvisionDetector",
            TorchvisionSettings,
            title="a detector of torchvision",
            losses=LIBRARY_LOSSES,
            backbone=False,
            inputs=LibraryInputSettings,
            example="retinanet_resnet50_fpn_v2",
        ),
        LibrarySpec(
            "transformers",
            "bucketrank.detectors.transformers:TransformersDetector",
            TransformersSettings,
            title="a detection transformer of transformers",
            losses=LIBRARY_LOSSES,
            backbone=False,
            inputs=LibraryInputSettings,
            example="PekingU/rtdetr_r50vd",
        ),
    )
}
