"""Load torchvision's Faster R-CNN, Mask R-CNN and RetinaNet weights into our detectors of the same architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bucketrank.detectors import Detector
from bucketrank.detectors.mask_rcnn import MaskRCNN
from bucketrank.detectors.rcnn import FasterRCNN
from bucketrank.detectors.retinanet import RetinaNet
from bucketrank.errors import WeightsError, suggest
from bucketrank.weights.sources import coco_weights, read_safetensors
from bucketrank.weights.tensor_table import Adaptation, Row, Translated, row, translate


@dataclass(frozen=True)
class TensorTable:
    """The rows for one of our detectors, its torchvision counterpart, and the flags that make both equal."""

    model: str
    flags: str
    rows: tuple[Row, ...]


# The COCO weights use tensor names from before torchvision 0.13, which lack some numbers of today's names: the FPN's
# "inner_blocks.0.weight" is now "inner_blocks.0.0.weight".
PYRAMID = (
    row(r"(backbone\.body\..+)", r"\1"),
    row(r"backbone\.fpn\.(inner|layer)_blocks\.(\d)\.(?:0\.)?$", r"neck.pyramid.\1_blocks.\2.0.$"),
)
FASTER_RCNN = (
    *PYRAMID,
    row(r"rpn\.head\.conv\.(?:0\.0\.)?$", r"rpn.head.conv.0.0.$"),
    row(r"rpn\.head\.cls_logits\.$", r"rpn.head.cls_logits.$"),
    row(r"rpn\.head\.bbox_pred\.$", r"rpn.head.bbox_pred.$", rows="deltas"),
    row(r"roi_heads\.box_head\.(fc[67])\.$", r"box_head.layers.\1.$"),
    row(r"roi_heads\.box_predictor\.cls_score\.$", r"box_head.classes.$", rows="classes"),
    row(r"roi_heads\.box_predictor\.bbox_pred\.$", r"box_head.boxes.$", rows="class_boxes"),
)
MASK_RCNN = (
    *FASTER_RCNN,
    *(row(rf"roi_heads\.mask_head\.(?:{i}\.0|mask_fcn{i + 1})\.$", rf"mask_head.0.{i}.0.$") for i in range(4)),
    row(r"roi_heads\.mask_predictor\.conv5_mask\.$", r"mask_head.1.conv5_mask.$"),
    row(r"roi_heads\.mask_predictor\.mask_fcn_logits\.$", r"mask_head.1.mask_fcn_logits.$", rows="class_rows"),
)
RETINANET = (
    *PYRAMID,
    row(r"backbone\.fpn\.(extra_blocks\..+)", r"neck.pyramid.\1"),
    *(
        row(rf"head\.{head}_head\.conv\.(?:{i}\.0|{2 * i})\.$", rf"head.{tower}_tower.{i}.0.$")
        for head, tower in (("classification", "class"), ("regression", "box"))
        for i in range(4)
    ),
    row(r"head\.classification_head\.cls_logits\.$", r"head.classes.$", rows="anchor_classes"),
    row(r"head\.regression_head\.bbox_reg\.$", r"head.boxes.$", rows="deltas"),
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
    if type(model) not in DETECTORS:
        raise WeightsError(
            f"init: expected one of the detectors {', '.join(TABLES)} for torchvision:{source}, "
            f"got {type(model).__name__}; {OTHER_INIT}"
        )
    table = TABLES[DETECTORS[type(model)]]
    if source.endswith(".safetensors") or "/" in source:
        state, names, from_coco = _read(Path(source)), None, False
    else:
        _require_name(table, source)
        state, names = coco_weights(source, setting="init", remedy=OTHER_INIT)
        from_coco = True
    translated = translate(state, table.rows)
    adaptation = _adaptation(model, translated, classes=classes, names=names)
    own = model.state_dict()
    converted: dict[str, Tensor] = {}
    skipped, misfits = [], list(translated.unknown)
    for name, tensor in translated.state.items():
        try:
            adapted = adaptation(translated.rows[name], tensor)
        except (IndexError, RuntimeError):  # it does not have the expected rows
            misfits.append(name)
            continue
        if adapted is None:
            skipped.append(name)
        elif _fits(adapted, own.get(name)):
            converted[name] = adapted
        else:
            misfits.append(name)
    misfits += [name for name in _to_be_loaded(model) if name not in {*converted, *skipped, *misfits}]
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
    if from_coco:
        for name in converted:
            if name.endswith("running_var"):
                converted[name] = converted[name].clamp(min=MIN_VARIANCE) - EPSILON
    model.load_state_dict(converted, strict=False)
    return skipped


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


def _to_be_loaded(model: Detector) -> list[str]:
    """List the parameters and running statistics, without counters and the state of a loss."""
    statistics = [name for name in model.state_dict() if name.endswith(("running_mean", "running_var"))]
    return [*(name for name, _ in model.named_parameters()), *statistics]


def _fits(tensor: Tensor, own: Tensor | None) -> bool:
    return own is not None and (tensor.shape, tensor.is_floating_point()) == (own.shape, own.is_floating_point())


def _adaptation(
    model: Any, translated: Translated, *, classes: Sequence[str] | None, names: Sequence[str] | None
) -> Adaptation:
    """Choose the labels of the model's classes; torchvision counts the background as label 0."""
    dense = isinstance(model, RetinaNet)
    anchors = model.head.boxes.out_channels // 4 if dense else 1
    classifiers = [name for name, rows in translated.rows.items() if rows in ("classes", "anchor_classes")]
    count = next((len(each) // anchors for name in classifiers if (each := translated.state[name]).dim()), 0)
    labels: list[int] | None = None
    if names is not None and classes is not None:
        if set(classes) <= set(names) - set(WITHOUT_OBJECTS):
            labels = [names.index(name) for name in classes]
    elif count == model.num_classes + 1:
        labels = list(range(1, count))
    return Adaptation(
        labels=labels,
        num_labels=count,
        background=0,
        softmax=not dense and model.box_head.criterion.softmax,
        delta_factors=(model.coder if dense else model.rpn.box_coder).weights,  # torchvision's are 1
    )
