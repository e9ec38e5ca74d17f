"""Load torchvision's Faster R-CNN, Mask R-CNN and RetinaNet weights into our detectors of the same architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, cat

from bucketrank.detectors import Detector
from bucketrank.detectors.mask_rcnn import MaskRCNN
from bucketrank.detectors.rcnn import FasterRCNN
from bucketrank.detectors.retinanet import RetinaNet
from bucketrank.errors import WeightsError, suggest
from bucketrank.weights.sources import coco_weights, read_safetensors

# Conversion of a tensor. torchvision counts the background as label 0; our classes do not include it.
Change = Literal[
    "none",
    "variance",  # batch norm variance, adapted to our epsilon
    "deltas",  # (4 * anchors, ...) rows of box deltas, adapted to our delta weights
    "classes",  # (labels, ...) with the background first; ours has it last, or not at all
    "class_boxes",  # (4 * labels, ...)
    "class_masks",  # (labels, ...)
    "anchor_classes",  # (anchors * labels, ...)
]
CLASS_CHANGES = ("classes", "class_boxes", "class_masks", "anchor_classes")  # layers that depend on the classes


@dataclass(frozen=True)
class TableRow:
    """A pattern for torchvision tensor names, our name with its groups, and the change to the tensor."""

    pattern: str
    name: str
    change: Change = "none"

    @cached_property
    def expression(self) -> re.Pattern[str]:
        return re.compile(self.pattern)


@dataclass(frozen=True)
class TensorTable:
    """The rows for one of our detectors, its torchvision counterpart, and the flags that make both equal."""

    model: str
    flags: str
    rows: tuple[TableRow, ...]

    def translated(self, name: str) -> tuple[str, Change] | None:
        """Translate a torchvision tensor name to ours, with the change to the tensor; None for an unknown name."""
        for row in self.rows:
            if match := row.expression.fullmatch(name):
                return match.expand(row.name), row.change
        return None


# The COCO weights use tensor names from before torchvision 0.13, which lack some numbers of today's names: the FPN's
# "inner_blocks.0.weight" is now "inner_blocks.0.0.weight".
PYRAMID = (
    TableRow(r"(backbone\.body\..+\.running_var)", r"\1", "variance"),
    TableRow(r"(backbone\.body\..+)", r"\1"),
    TableRow(r"backbone\.fpn\.(inner|layer)_blocks\.(\d)\.(?:0\.)?(weight|bias)", r"neck.pyramid.\1_blocks.\2.0.\3"),
)
FASTER_RCNN = (
    *PYRAMID,
    TableRow(r"rpn\.head\.conv\.(?:0\.0\.)?(weight|bias)", r"rpn.head.conv.0.0.\1"),
    TableRow(r"(rpn\.head\.cls_logits\..+)", r"\1"),
    TableRow(r"(rpn\.head\.bbox_pred\..+)", r"\1", "deltas"),
    TableRow(r"roi_heads\.box_head\.(fc[67]\..+)", r"box_head.layers.\1"),
    TableRow(r"roi_heads\.box_predictor\.cls_score\.(.+)", r"box_head.classes.\1", "classes"),
    TableRow(r"roi_heads\.box_predictor\.bbox_pred\.(.+)", r"box_head.boxes.\1", "class_boxes"),
)
MASK_RCNN = (
    *FASTER_RCNN,
    *(
        TableRow(rf"roi_heads\.mask_head\.(?:{i}\.0|mask_fcn{i + 1})\.(weight|bias)", rf"mask_head.0.{i}.0.\1")
        for i in range(4)
    ),
    TableRow(r"roi_heads\.mask_predictor\.(conv5_mask\..+)", r"mask_head.1.\1"),
    TableRow(r"roi_heads\.mask_predictor\.(mask_fcn_logits\..+)", r"mask_head.1.\1", "class_masks"),
)
RETINANET = (
    *PYRAMID,
    TableRow(r"backbone\.fpn\.(extra_blocks\..+)", r"neck.pyramid.\1"),
    *(
        TableRow(rf"head\.{head}_head\.conv\.(?:{i}\.0|{2 * i})\.(weight|bias)", rf"head.{tower}_tower.{i}.0.\1")
        for head, tower in (("classification", "class"), ("regression", "box"))
        for i in range(4)
    ),
    TableRow(r"head\.classification_head\.cls_logits\.(.+)", r"head.classes.\1", "anchor_classes"),
    TableRow(r"head\.regression_head\.bbox_reg\.(.+)", r"head.boxes.\1", "deltas"),
)

RCNN_FLAGS = "--backbone.name resnet50 --detector.channels 256 --detector.hidden 1024 --detector.roi_align torchvision"
TABLES = {  # our detector: its table
    "faster_rcnn": TensorTable("fasterrcnn_resnet50_fpn", RCNN_FLAGS, FASTER_RCNN),
    "mask_rcnn": TensorTable("maskrcnn_resnet50_fpn", RCNN_FLAGS, MASK_RCNN),
    "retinanet": TensorTable(
        "retinanet_resnet50_fpn",
        "--backbone.name resnet50 --detector.channels 256 --detector.convs 4 --detector.scales 3 "
        "--detector.extra_levels p5_relu",
        RETINANET,
    ),
}

# torchvision models whose architecture none of our detectors has, and the reason.
OTHER_ARCHITECTURES = {
    "fasterrcnn_resnet50_fpn_v2": "its pyramid has norms, its RPN two convolutions and its box head four",
    "maskrcnn_resnet50_fpn_v2": "its pyramid has norms, its RPN two convolutions and its box head four",
    "retinanet_resnet50_fpn_v2": "its head has group norms",
}

DETECTORS = {FasterRCNN: "faster_rcnn", MaskRCNN: "mask_rcnn", RetinaNet: "retinanet"}
OTHER_INIT = "start from a run with --init FILE.safetensors, or without --init"
WITHOUT_OBJECTS = ("__background__", "N/A")  # torchvision label names without objects

# The COCO weights were trained with a batch norm epsilon of 0; our backbones use 1e-5.
EPSILON = 1e-5
MIN_VARIANCE = 1e-10  # a channel that is always 0 has this variance; 1e-5 has no finer digits in float32


def load_from_torchvision(model: Detector, source: str, *, classes: Sequence[str] | None = None) -> list[str]:
    """Load ``source``, a torchvision model with COCO weights or a .safetensors file with the state of such a model.

    Class layers take the labels of ``classes`` if COCO has them all. From a file, they take the labels in order if
    their number is the same. Otherwise they stay unchanged. Returns the names of the unchanged tensors. Raises
    WeightsError for weights of another architecture, and ConnectionError if a download fails.
    """
    table = _table_of(model, source)
    if source.endswith(".safetensors") or "/" in source:
        state, names, from_coco = _read(Path(source)), None, False
    else:
        _require_name(table, source)
        state, names = coco_weights(source, setting="init", remedy=OTHER_INIT)
        from_coco = True
    translated = {name: table.translated(name) for name in state}
    unknown = [name for name, target in translated.items() if target is None]
    renamed = {ours: (change, state[name]) for name, (ours, change) in _known(translated)}
    conversion = _Conversion.of(model, renamed, classes=classes, names=names, zero_epsilon=from_coco)
    converted = {
        name: conversion(change, tensor)
        for name, (change, tensor) in renamed.items()
        if conversion.labels is not None or change not in CLASS_CHANGES
    }
    own = model.state_dict()
    skipped = [name for name, (change, _) in renamed.items() if change in CLASS_CHANGES and name not in converted]
    misfits = [*unknown, *(name for name, tensor in converted.items() if not _fits(tensor, own.get(name)))]
    misfits += [name for name in _to_be_loaded(model) if name not in converted and name not in skipped]
    if misfits:
        raise WeightsError(
            f"init: expected weights like those of torchvision's {table.model}, got torchvision:{source}, of which "
            f"{len(misfits)} tensors are missing, unknown or of another shape, like {misfits[0]}; "
            f"build the detector like that model: {table.flags}"
        )
    if getattr(model, "roi_align", "torchvision") != "torchvision":
        raise WeightsError(
            f"init: expected detector.roi_align torchvision for torchvision:{source}, whose heads were trained with "
            "torchvision's RoIAlign, got published; add --detector.roi_align torchvision"
        )
    model.load_state_dict(converted, strict=False)
    return skipped


def _table_of(model: Detector, source: str) -> TensorTable:
    if type(model) not in DETECTORS:
        raise WeightsError(
            f"init: expected one of the detectors {', '.join(TABLES)} for torchvision:{source}, "
            f"got {type(model).__name__}; {OTHER_INIT}"
        )
    return TABLES[DETECTORS[type(model)]]


def _require_name(table: TensorTable, source: str) -> None:
    """Raise unless ``source`` is the torchvision model of the table."""
    if source == table.model:
        return
    expected = f"init: expected torchvision:{table.model} for this detector, got torchvision:{source}"
    if source in OTHER_ARCHITECTURES:
        raise WeightsError(
            f"{expected}, which has another architecture ({OTHER_ARCHITECTURES[source]}); use torchvision:{table.model}"
        )
    for name, other in TABLES.items():
        if source == other.model:
            raise WeightsError(f"{expected}, which fits --detector.name {name}; use torchvision:{table.model}")
    models = [other.model for other in TABLES.values()]
    raise WeightsError(f"{expected}{suggest(source, models)}; a file needs the ending .safetensors")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return read_safetensors(path, setting="init", others="torchvision:MODEL")
    except (OSError, ValueError) as error:
        raise WeightsError(str(error)) from error


def _known(translated: Mapping[str, tuple[str, Change] | None]) -> list[tuple[str, tuple[str, Change]]]:
    return [(name, target) for name, target in translated.items() if target is not None]


def _to_be_loaded(model: Detector) -> list[str]:
    """List the parameters and running statistics, without counters and the state of a loss."""
    statistics = [name for name in model.state_dict() if name.endswith(("running_mean", "running_var"))]
    return [*(name for name, _ in model.named_parameters()), *statistics]


def _fits(tensor: Tensor | None, own: Tensor | None) -> bool:
    if tensor is None or own is None:
        return False
    return tensor.shape == own.shape and tensor.is_floating_point() == own.is_floating_point()


@dataclass(frozen=True)
class _Conversion:
    """Converts torchvision tensors for one detector."""

    labels: list[int] | None  # torchvision's label of each class; None if the class layers stay unchanged
    label_count: int  # number of torchvision labels, including the background
    softmax: bool  # True if our box head has a background logit
    delta_weights: tuple[float, float, float, float]  # our RPN or RetinaNet weights; torchvision's are 1
    zero_epsilon: bool

    @classmethod
    def of(
        cls,
        model: Any,
        renamed: Mapping[str, tuple[Change, Tensor]],
        *,
        classes: Sequence[str] | None,
        names: Sequence[str] | None,
        zero_epsilon: bool,
    ) -> _Conversion:
        dense = isinstance(model, RetinaNet)
        count = _label_count(renamed, anchors=model.head.boxes.out_channels // 4 if dense else 1)
        labels: list[int] | None = None
        if names is not None and classes is not None:
            if set(classes) <= set(names) - set(WITHOUT_OBJECTS):
                labels = [names.index(name) for name in classes]
        elif count == model.num_classes + 1:
            labels = list(range(1, count))
        return cls(
            labels=labels,
            label_count=count,
            softmax=not dense and model.box_head.criterion.softmax,
            delta_weights=(model.coder if dense else model.rpn.box_coder).weights,
            zero_epsilon=zero_epsilon,
        )

    def __call__(self, change: Change, tensor: Tensor) -> Tensor | None:
        """Convert a tensor; return None if it does not have the expected rows."""
        try:
            return self._changed(change, tensor)
        except (IndexError, RuntimeError):
            return None

    def _changed(self, change: Change, tensor: Tensor) -> Tensor:
        labels, rest = self.labels or [], tensor.shape[1:]
        if change == "variance" and self.zero_epsilon:
            return tensor.clamp(min=MIN_VARIANCE) - EPSILON
        if change == "deltas":
            weights = tensor.new_tensor(self.delta_weights).reshape(4, *[1] * len(rest))
            return (tensor.reshape(-1, 4, *rest) * weights).flatten(0, 1)
        if change == "classes":
            # A head without a background logit gets the difference between class and background logits.
            return cat([tensor[labels], tensor[:1]]) if self.softmax else tensor[labels] - tensor[0]
        if change == "class_boxes":
            return tensor.reshape(-1, 4, *rest)[labels].flatten(0, 1)
        if change == "class_masks":
            return tensor[labels]
        if change == "anchor_classes":
            return tensor.reshape(-1, self.label_count, *rest)[:, labels].flatten(0, 1)
        return tensor


def _label_count(renamed: Mapping[str, tuple[Change, Tensor]], *, anchors: int) -> int:
    """Count torchvision's labels; 0 without a classifier."""
    for change, tensor in renamed.values():
        if change in ("classes", "anchor_classes") and tensor.dim():
            return len(tensor) // anchors
    return 0
