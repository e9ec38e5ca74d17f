"""Settings of the torchvision and transformers detectors, and the spec of each library.

A detector name consists of library and model, like ``torchvision/retinanet_resnet50_fpn_v2``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from bucketrank.errors import short_repr, suggest
from bucketrank.settings.detector_specs import (
    BatchNorm,
    DetectorSettings,
    DetectorSpec,
    ImagePreparation,
    require_few_pixels,
)

LIBRARY_LOSSES = ("own", "rs", "ap")


@dataclass(frozen=True)
class LibraryInputSettings(ImagePreparation):
    """Image preprocessing for a library model. Null stands for the model's own value."""

    group: ClassVar[str] = "inputs"

    min_size: Annotated[
        int | tuple[int, ...] | None,
        "shorter side after resizing, or the side of square inputs (null: the model's); of several, training draws one "
        "and evaluation uses the last",
    ] = None
    max_size: Annotated[int | None, "maximum longer side after resizing (null: the model's)"] = None
    image_mean: Annotated[tuple[float, float, float] | None, "mean to subtract (null: the model's)"] = None
    image_std: Annotated[tuple[float, float, float] | None, "standard deviation to divide by (null: the model's)"] = (
        None
    )
    size_divisor: Annotated[int | None, "pad to a multiple of this (null: the model's)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.sizes
        self.require("min_size", "sizes of at least 1", holds=sizes is None or (sizes != () and min(sizes) >= 1))
        self.require_min(max_size=1)
        if sizes is not None and self.max_size is not None and max(sizes) > self.max_size:
            raise ValueError(
                f"inputs.min_size: expected sizes up to max_size, got {self.min_size} with max_size {self.max_size}"
            )
        if sizes is not None:
            require_few_pixels(max(sizes), self.max_size or max(sizes))
        self.require_valid_preparation()

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """``min_size`` as a tuple; None for the model's own value."""
        return (self.min_size,) if isinstance(self.min_size, int) else self.min_size


@dataclass(frozen=True)
class LibrarySettings(DetectorSettings):
    """Base class of the library detector settings."""

    @property
    def model(self) -> str:
        """The model name, which follows the library name."""
        return self.name.partition("/")[2]


@dataclass(frozen=True)
class BackboneLayers:
    """Layer count of a torchvision backbone, and torchvision's training choices for a model with weights."""

    total: int = 5
    trained: int = 3
    batch_norm: BatchNorm = "trained"


# All torchvision detectors except Keypoint R-CNN: our data sets have no keypoints.
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
    """Settings of the torchvision detectors.

    A weights file has torchvision's tensor names. Layers whose shape depends on the number of classes keep their
    initial values if that number differs. The only pickles that are loaded are torchvision's own downloads, without
    their code.
    """

    filled_by_run: ClassVar[tuple[str, ...]] = ("score_threshold",)

    weights: Annotated[str | None, "null (random), coco (torchvision's, downloaded) or a .safetensors file"] = None
    trainable_layers: Annotated[
        int | None, "number of trained backbone layers, from the last one (null: torchvision's choice; all if random)"
    ] = None
    batch_norm: Annotated[BatchNorm, "frozen, trained, or auto (torchvision's choice; trained without weights)"] = (
        "auto"
    )
    proposals: Annotated[int | None, "R-CNNs: proposals per image in training (null: torchvision's, 2000)"] = None
    score_threshold: Annotated[
        float | None, "drop detections below this before NMS (null: 0 with a ranking loss, else torchvision's)"
    ] = None
    nms: Annotated[float | None, "IoU above which NMS removes the lower score (null: torchvision's)"] = None
    detections: Annotated[int | None, "maximum detections per image (null: torchvision's)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in TORCHVISION_MODELS:
            known = [f"torchvision/{model}" for model in TORCHVISION_MODELS]
            raise ValueError(
                f"detector.name: expected one of {', '.join(known)}, got {short_repr(self.name)}"
                + suggest(self.name, known)
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
    """Settings of the transformers detectors. A model is a folder or a name on the Hugging Face hub.

    Only safetensors are loaded. Layers whose shape depends on the number of classes are reinitialised if that number
    differs. A run stores ``config`` and ``processor``, so that its weights files need neither the folder nor the hub.
    """

    filled_by_run: ClassVar[tuple[str, ...]] = ("config", "processor")

    weights: Annotated[Literal["pretrained"] | None, "pretrained (from the folder or the hub) or null (random)"] = (
        "pretrained"
    )
    freeze_backbone: Annotated[bool, "do not train the backbone"] = False
    class_cost: Annotated[
        float | None, "class weight in Hungarian matching with a ranking loss (null: the model's)"
    ] = None
    score_threshold: Annotated[float, "keep detections with a score above this"] = 0.0
    detections: Annotated[int, "maximum detections per image"] = 100
    config: Annotated[str | None, "config.json of the model as text (null: from the folder or the hub)"] = None
    processor: Annotated[str | None, "preprocessor_config.json of the model as text (filled in with config)"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("name", "transformers/FOLDER or transformers/HUB_NAME", holds=self.model != "")
        self.require_finite("class_cost")

    def without_weights(self) -> TransformersSettings:
        return replace(self, weights=None)


@dataclass(frozen=True)
class LibrarySpec(DetectorSpec):
    """The declaration of a detector library. ``example`` is a model name for messages."""

    example: str = ""  # a model name

    def load(self) -> Any:
        """Import the class that wraps the library's models; ValueError if the library is missing or too old."""
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
            title="a torchvision detector",
            losses=LIBRARY_LOSSES,
            backbone=False,
            inputs=LibraryInputSettings,
            example="retinanet_resnet50_fpn_v2",
        ),
        LibrarySpec(
            "transformers",
            "bucketrank.detectors.transformers:TransformersDetector",
            TransformersSettings,
            title="a transformers detector",
            losses=LIBRARY_LOSSES,
            backbone=False,
            inputs=LibraryInputSettings,
            example="PekingU/rtdetr_r50vd",
        ),
    )
}
