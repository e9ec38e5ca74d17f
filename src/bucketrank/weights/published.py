"""Published checkpoints for our detectors: recognise, convert and load the weights of MMDetection.

``convert_published`` writes a model file that every command takes. ``load_published`` gives the weights to a detector
that is about to be trained, with other classes or another loss if need be. Every tensor of a checkpoint must have its
place, and every tensor of the detector must be filled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bucketrank.catalogue import detectors as detector_names
from bucketrank.detectors import Detector
from bucketrank.recipes import from_dict
from bucketrank.suggestions import require_choice
from bucketrank.weights.files import Meta, WeightsError, save_weights
from bucketrank.weights.load import build_detector
from bucketrank.weights.published_file import Checkpoint, read_checkpoint
from bucketrank.weights.published_table import (
    HEAD_ROWS,
    HEADS,
    LAST_NORM,
    MMDET_SWIN,
    RESNET,
    SWIN,
    UNUSED,
    Row,
    Rows,
    Translated,
    co_detr_rows,
    translate,
)

DETECTORS = "atss, paa, retinanet, faster_rcnn, mask_rcnn, cascade_rcnn, co_detr"
THRESHOLD = 0.3  # minimum score to report; MMDetection draws detections from this score on
RESNET_DEPTHS = {(3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152}
SWIN_NAMES = {(96, (2, 2, 6, 2)): "swin_tiny", (192, (2, 2, 18, 2)): "swin_large"}
LVIS_CLASSES = 1203
ATTENTION_HEADS = 8
# Classification layers of other detectors, by the start of their names, and what to say about them.
OTHERS = {
    "query_head.dn_generator.": "Co-DINO, which is not supported yet",
    "query_head.transformer.decoder.ref_point_head.": "Co-DINO, which is not supported yet",
    "bbox_head.gfl_cls": "GFL",
    "bbox_head.conv_cls": "FCOS",
    "bbox_head.shared_fcs.": "a detector of MMDetection 1, whose classes count from the background",
    "roi_head.mask_head.0.": "Cascade Mask R-CNN",
    "backbone.stem.": "another backbone",
}


@dataclass(frozen=True)
class Source:
    """A recognised checkpoint: the recipe of its detector, its classes and its table of tensors."""

    detector: str
    recipe: dict[str, dict[str, Any]]
    num_classes: int
    softmax: bool  # whether the box heads have a background logit
    table: tuple[Row, ...] = field(repr=False)


@dataclass(frozen=True)
class Converted:
    """A published checkpoint as one of our detectors."""

    model: Detector
    meta: Meta
    keys: int  # tensors of the checkpoint
    detector: str
    backbone: str
    loss: str

    def __str__(self) -> str:
        return (
            f"{self.detector} with {self.backbone}, trained with {self.loss}; {self.keys} of {self.keys} keys, "
            f"{len(self.meta.classes)} classes"
        )


def convert_published(
    path: Path | str,
    out: Path | str | None = None,
    *,
    detector: str | None = None,
    classes: Sequence[str] | None = None,
    threshold: float = THRESHOLD,
    ema: bool = False,
) -> Converted:
    """Convert a checkpoint of MMDetection 2 or 3, and write it to ``out`` as a model file.

    The detector, its backbone and its loss are recognised from names and shapes of the tensors. Class names come from
    the checkpoint; a checkpoint without any and with 80 classes has COCO's. No code in the checkpoint is run.
    WeightsError, in one line, for a file that cannot be read, another detector, and missing or unknown tensors.

    Args:
        path: the checkpoint, ``.pth``.
        out: the model file to write; None writes none.
        detector: ``atss`` or ``paa``, whose tensors have the same names; by default from the file's configuration or
            name.
        classes: names of the classes, for a checkpoint without any.
        threshold: minimum score to report.
        ema: take the copies named ``ema_`` instead of the weights.
    """
    checkpoint = read_checkpoint(path, ema=ema)
    source = recognise(checkpoint, detector=detector)
    names, ids = _classes(checkpoint, source, classes)
    recipe = from_dict(source.recipe, source=str(path))
    translated = _translated(checkpoint, source)
    model = build_detector(recipe, num_classes=len(names))
    _load_strictly(checkpoint, source, model, translated.state, unknown=translated.unknown)
    model.stored_threshold = threshold
    meta = Meta(
        classes=names,
        category_ids=ids,
        threshold=threshold,
        recipe=recipe.to_dict(),
        origin=checkpoint.origin,
    )
    if out is not None:
        save_weights(out, model, meta)
    return Converted(
        model.eval(),
        meta,
        keys=len(checkpoint.state),
        detector=source.detector,
        backbone=recipe.backbone.name,
        loss=recipe.loss.name,
    )


def load_published(model: Detector, path: Path | str, *, classes: Sequence[str] | None = None) -> list[str]:
    """Load a checkpoint of MMDetection into ``model``; return the names of the tensors that keep their values.

    ``classes`` are the names of the model's classes. Class layers take the rows of these names if the checkpoint has
    them all, otherwise they keep their values. A model without a background logit takes the difference to it; box
    deltas are rescaled for the model's own deviations.
    """
    checkpoint = read_checkpoint(path)
    spec = next((name for name, each in detector_names().items() if each.load() is type(model)), "")
    if spec not in DETECTORS.split(", "):
        raise WeightsError(f"init: expected one of {DETECTORS} for mmdet:{path}, got {spec or type(model).__name__}")
    source = recognise(checkpoint, detector=spec if spec in ("atss", "paa") else None)
    if source.detector != spec:
        raise WeightsError(
            f"init: expected weights of {spec}, got those of {source.detector} in {path}; train with --detector.name "
            f"{source.detector}"
        )
    heads = getattr(model, "auxiliary", None)
    if heads is not None and set(heads) != set(HEADS):
        raise WeightsError(f"init: expected detector.auxiliary {', '.join(HEADS)} for mmdet:{path}, got {list(heads)}")
    names, _ = _classes(checkpoint, source, None, required=False)
    translated = _translated(checkpoint, source)
    adaptation = _Adaptation.of(model, source, names, classes)
    state, skipped = {}, []
    own = model.state_dict()
    for name, tensor in translated.state.items():
        rows = translated.rows[name]
        if rows == "quality" and name not in own:
            continue  # a loss that sees the IoU needs no branch for it
        adapted = adaptation(rows, tensor, name)
        if adapted is None:
            skipped.append(name)
        else:
            state[name] = adapted
    _load_strictly(checkpoint, source, model, state, unknown=translated.unknown, skipped=skipped)
    return skipped


def recognise(checkpoint: Checkpoint, *, detector: str | None = None) -> Source:
    """Return the detector that a checkpoint belongs to, from the names and shapes of its tensors."""
    try:
        return _recognise(checkpoint, detector)
    except (IndexError, KeyError, ZeroDivisionError) as error:
        raise WeightsError(
            f"{checkpoint.path}: expected the tensors of a published detector, got a checkpoint without {error}; it is "
            "incomplete or of another architecture"
        ) from error


def _recognise(checkpoint: Checkpoint, detector: str | None) -> Source:
    state = checkpoint.state
    for start, what in OTHERS.items():
        if any(key.startswith(start) for key in state):
            raise WeightsError(f"{checkpoint.path}: expected one of {DETECTORS}, got {what}; choose another checkpoint")
    backbone, backbone_rows = _backbone(checkpoint)
    groups: dict[str, dict[str, Any]] = {"backbone": backbone}
    if "query_head.cls_branches.0.weight" in state:
        name, num_classes, softmax, loss = _co_detr(state, groups)
    elif "bbox_head.retina_cls.weight" in state:
        name = "retinanet"
        anchors = len(state["bbox_head.retina_reg.weight"]) // 4
        num_classes, softmax = len(state["bbox_head.retina_cls.weight"]) // anchors, False
        loss = "rs" if anchors == 6 else "focal"
        groups["detector"] = {
            "scales": anchors // 3,
            "convs": _count(state, r"bbox_head\.cls_convs\.(\d+)\."),
            "score_threshold": 0.05,
        }
    elif "bbox_head.atss_cls.weight" in state:
        name = _atss_or_paa(checkpoint, detector)
        anchors = len(state["bbox_head.atss_reg.weight"]) // 4
        num_classes, softmax = len(state["bbox_head.atss_cls.weight"]) // anchors, False
        loss = "focal" if "bbox_head.atss_centerness.weight" in state else "rs"
        groups["detector"] = {
            "anchors": anchors,
            "convs": _count(state, r"bbox_head\.cls_convs\.(\d+)\."),
            "score_threshold": 0.05,
        }
    elif any(re.match(r"roi_head\.bbox_head\.(0\.)?fc_cls\.weight", key) for key in state):
        name, num_classes, softmax, loss = _rcnn(checkpoint, groups)
    else:
        starts = sorted({key.partition(".")[0] for key in state})[:6]
        raise WeightsError(
            f"{checkpoint.path}: expected one of {DETECTORS}, got a checkpoint with {', '.join(starts)}; choose "
            "another checkpoint"
        )
    if detector is not None and detector != name:
        raise WeightsError(
            f"{checkpoint.path}: expected weights of {detector}, got those of {name}; leave out --detector"
        )
    channels = "query_head.transformer.level_embeds" if name == "co_detr" else "neck.lateral_convs.0.conv.weight"
    width = state[channels].shape[1] if name == "co_detr" else len(state[channels])
    groups["detector"] = {"name": name, "channels": width} | groups.get("detector", {})
    groups["loss"] = {"name": loss}
    rows = co_detr_rows(groups["detector"]["decoder_layers"]) if name == "co_detr" else HEAD_ROWS[name]
    return Source(name, groups, num_classes, softmax, table=(*backbone_rows, *rows))


def _atss_or_paa(checkpoint: Checkpoint, detector: str | None) -> str:
    """Return which of the two a checkpoint is: their tensors have the same names and shapes."""
    if detector is not None:
        require_choice("detector", detector, ("atss", "paa"))
        return detector
    word = r"(?i)(?<![a-z]){}(?:head)?(?![a-z])"
    found = [name for name in ("atss", "paa") if checkpoint.mentions(word.format(name))]
    if len(found) != 1:
        raise WeightsError(
            f"{checkpoint.path}: expected a configuration or a file name that tells ATSS from PAA, whose tensors "
            "have the same names, got none; add --detector atss or --detector paa"
        )
    return found[0]


def _rcnn(checkpoint: Checkpoint, groups: dict[str, dict[str, Any]]) -> tuple[str, int, bool, str]:
    state = checkpoint.state
    cascade = "roi_head.bbox_head.0.fc_cls.weight" in state
    head = "roi_head.bbox_head.0" if cascade else "roi_head.bbox_head"
    logits, box_rows = len(state[f"{head}.fc_cls.weight"]), len(state[f"{head}.fc_reg.weight"])
    if cascade:  # one box for all classes: only the names tell whether the last logit is the background
        names = checkpoint.classes or coco_classes()[0]
        num_classes = len(names)
        if logits - num_classes not in (0, 1):
            raise WeightsError(
                f"{checkpoint.path}: expected {num_classes} logits, or {num_classes + 1} with the background, for "
                f"{num_classes} class names, got {logits}; the classes inside are those of another data set"
            )
    else:
        num_classes = box_rows // 4
    softmax = logits == num_classes + 1
    name = (
        "cascade_rcnn"
        if cascade
        else "mask_rcnn"
        if "roi_head.mask_head.conv_logits.weight" in state
        else "faster_rcnn"
    )
    lvis = num_classes == LVIS_CLASSES
    groups["detector"] = {
        "hidden": len(state[f"{head}.shared_fcs.0.weight"]),
        # The published thresholds. A box head trained by ranking starts at scores of 0.5.
        "score_threshold": (0.0001 if lvis else 0.05) if softmax else (0.6 if lvis else 0.4),
        "detections": 300 if lvis else 100,
    }
    return name, num_classes, softmax, "ce" if softmax else "rs"


def _co_detr(state: Mapping[str, Tensor], groups: dict[str, dict[str, Any]]) -> tuple[str, int, bool, str]:
    num_classes = len(state["query_head.cls_branches.0.weight"])
    transformer = "query_head.transformer"
    attention = f"{transformer}.encoder.layers.0.attentions.0.attention_weights.weight"
    levels = len(state[f"{transformer}.level_embeds"])
    softmax = len(state["roi_head.0.bbox_head.fc_cls.weight"]) == num_classes + 1
    groups["detector"] = {
        "published": True,
        "queries": len(state["query_head.query_embedding.weight"]),
        "encoder_layers": _count(state, rf"{re.escape(transformer)}\.encoder\.layers\.(\d+)\."),
        "decoder_layers": _count(state, rf"{re.escape(transformer)}\.decoder\.layers\.(\d+)\."),
        "heads": ATTENTION_HEADS,
        "points": len(state[attention]) // (levels * ATTENTION_HEADS),
        "feedforward": len(state[f"{transformer}.encoder.layers.0.ffns.0.layers.0.0.weight"]),
        "hidden": len(state["roi_head.0.bbox_head.shared_fcs.0.weight"]),
    }
    return "co_detr", num_classes, softmax, "focal" if softmax else "rs"


def _backbone(checkpoint: Checkpoint) -> tuple[dict[str, Any], tuple[Row, ...]]:
    state = checkpoint.state
    frozen = {"frozen_stages": 1, "batch_norm": "frozen"}
    for stages, rows in (("layers", SWIN), ("stages", MMDET_SWIN)):
        if f"backbone.{stages}.0.blocks.0.norm1.weight" in state:
            width = len(state["backbone.patch_embed.norm.weight"])
            depths = tuple(_count(state, rf"backbone\.{stages}\.{i}\.blocks\.(\d+)\.") for i in range(4))
            if (width, depths) not in SWIN_NAMES:
                raise WeightsError(
                    f"{checkpoint.path}: expected Swin-T or Swin-L, got a Swin of width {width} with {depths} blocks; "
                    "choose another checkpoint"
                )
            return {"name": SWIN_NAMES[width, depths], "frozen_stages": 0}, rows
    depths = tuple(_count(state, rf"backbone\.layer{i}\.(\d+)\.") for i in range(1, 5))
    if depths not in RESNET_DEPTHS or "backbone.layer1.0.conv3.weight" not in state:
        raise WeightsError(
            f"{checkpoint.path}: expected a ResNet-50, -101 or -152 or a Swin as backbone, got another; choose another "
            "checkpoint"
        )
    if checkpoint.mentions(r"style=['\"]caffe['\"]|_caffe_"):
        raise WeightsError(
            f"{checkpoint.path}: expected a ResNet of PyTorch's style, got Caffe's, with other strides and "
            "normalisation; choose a checkpoint without caffe in its name"
        )
    offsets = [len(tensor) for key, tensor in state.items() if key.endswith(".conv_offset.weight")]
    if any(rows % 27 for rows in offsets):
        raise WeightsError(
            f"{checkpoint.path}: expected modulated deformable convolutions (DCNv2), got DCNv1; choose another "
            "checkpoint"
        )
    groups = offsets[0] // 27 if offsets else 0
    return {"name": f"resnet{RESNET_DEPTHS[depths]}", "deformable_groups": groups, **frozen}, RESNET


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    """Return one more than the highest number that a pattern finds at the start of the names; 0 without any."""
    return 1 + max((int(match[1]) for key in state if (match := re.match(pattern, key))), default=-1)


def coco_classes() -> tuple[list[str], list[int]]:
    """Return the names of COCO's 80 classes, and their category ids from 1 to 90."""
    from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

    categories = FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    numbered = [(number, name) for number, name in enumerate(categories) if name not in ("__background__", "N/A")]
    return [name for _, name in numbered], [number for number, _ in numbered]


def _classes(
    checkpoint: Checkpoint, source: Source, given: Sequence[str] | None, *, required: bool = True
) -> tuple[list[str], list[int]]:
    """Return the class names and their category ids."""
    coco, coco_ids = coco_classes()
    names = list(given) if given is not None else checkpoint.classes
    if names is None and source.num_classes == len(coco):
        names = coco
    if names is None and not required:
        return [], []
    if names is None or len(names) != source.num_classes:
        got = "none" if names is None else str(len(names))
        raise WeightsError(
            f"{checkpoint.path}: expected the names of {source.num_classes} classes, got {got}; give them in order "
            "with --classes NAME,NAME,..."
        )
    if len(set(names)) < len(names):
        raise WeightsError(
            f"{checkpoint.path}: expected different class names, got some twice; give them with --classes"
        )
    if set(names) == set(coco):
        return names, [coco_ids[coco.index(name)] for name in names]
    return names, list(range(1, len(names) + 1))


def _translated(checkpoint: Checkpoint, source: Source) -> Translated:
    try:
        return translate(checkpoint.state, source.table)
    except (IndexError, RuntimeError, ValueError) as error:
        raise WeightsError(
            f"{checkpoint.path}: expected the tensors of {source.detector}, got one of another shape; the file "
            "is damaged or of another architecture"
        ) from error


def _load_strictly(
    checkpoint: Checkpoint,
    source: Source,
    model: Detector,
    state: Mapping[str, Tensor],
    *,
    unknown: Sequence[str],
    skipped: Sequence[str] = (),
) -> None:
    """Load tensors that fit, or raise: nothing without a place, nothing unfilled, no number that is not finite."""
    own = model.state_dict()
    unused = LAST_NORM if source.detector.endswith("rcnn") else UNUSED  # the pyramid of an R-CNN reads every map
    faults = {
        "unknown": [*unknown, *(name for name in state if name not in own)],
        "missing": [
            name
            for name in own
            if name not in state
            and name not in skipped
            and not name.endswith("num_batches_tracked")
            and not re.fullmatch(unused, name)
        ],
        "of another shape": [name for name, each in state.items() if name in own and each.shape != own[name].shape],
        "of another type": [
            name
            for name, each in state.items()
            if name in own and each.is_floating_point() != own[name].is_floating_point()
        ],
        "not finite": [
            name for name, each in state.items() if each.is_floating_point() and not bool(each.isfinite().all())
        ],
    }
    if any(faults.values()):
        parts = [f"{len(names)} {fault} ({names[0]})" for fault, names in faults.items() if names]
        raise WeightsError(
            f"{checkpoint.path}: expected every tensor of {source.detector} ({source.recipe['backbone']['name']}), got "
            f"{', '.join(parts)}; the file is incomplete or of another architecture"
        )
    model.load_state_dict({name: tensor.to(own[name].dtype) for name, tensor in state.items()}, strict=False)


@dataclass(frozen=True)
class _Adaptation:
    """The change of class layers and box deltas for a detector with other classes or another loss."""

    labels: list[int] | None  # published class of each of the model's classes; None if class layers keep their values
    num_classes: int  # of the checkpoint
    background: bool  # whether the checkpoint has a background logit
    softmax: bool  # whether the model has one
    proposer_rows: int  # logits of the model's proposals, in Co-DETR
    marks: int  # numbers that mark the queries of one of its auxiliary heads
    delta_factors: tuple[float, float, float, float]  # from published box deltas to the model's

    @classmethod
    def of(cls, model: Any, source: Source, names: Sequence[str], classes: Sequence[str] | None) -> _Adaptation:
        labels: list[int] | None = None
        if classes is not None and names:
            labels = [names.index(name) for name in classes] if set(classes) <= set(names) else None
        elif model.num_classes == source.num_classes:
            labels = list(range(source.num_classes))
        head = {"cascade_rcnn": lambda: model.stages[0], "co_detr": lambda: model.auxiliary["faster_rcnn"].roi}
        has_boxes = source.detector not in ("atss", "paa", "retinanet")
        roi = head.get(source.detector, lambda: model.box_head)() if has_boxes else None
        return cls(
            labels=labels,
            num_classes=source.num_classes,
            background=source.softmax,
            softmax=roi is not None and roi.criterion.softmax,
            proposer_rows=model.proposer.classes.out_features if source.detector == "co_detr" else 0,
            marks=len(model.auxiliary_queries["atss"].head) if source.detector == "co_detr" else 0,
            delta_factors=_delta_factors(model, source),
        )

    def __call__(self, rows: Rows, tensor: Tensor, name: str) -> Tensor | None:
        """Return the tensor for the model; None if it keeps its values."""
        rest = tensor.shape[1:]
        if rows == "deltas":
            factors = tensor.new_tensor(self.delta_factors).reshape(4, *[1] * len(rest))
            return (tensor.unflatten(0, (-1, 4)) * factors).flatten(0, 1)
        if rows == "proposer_classes":
            return tensor[: self.proposer_rows] if self.proposer_rows <= len(tensor) else None
        if name.startswith("auxiliary_queries.") and name.endswith(".head"):
            return tensor.expand(self.marks)
        if rows in ("", "quality") or (rows == "class_boxes" and len(tensor) == 4):
            return tensor
        if self.labels is None:
            return None
        if rows == "anchor_classes":
            return tensor.unflatten(0, (-1, self.num_classes))[:, self.labels].flatten(0, 1)
        if rows == "class_boxes":
            return tensor.unflatten(0, (-1, 4))[self.labels].flatten(0, 1)
        if rows == "classes" and self.background:
            if self.softmax:
                return torch.cat([tensor[self.labels], tensor[-1:]])
            return tensor[self.labels] - tensor[-1]  # the logit of a class against the background
        if rows == "classes" and self.softmax:
            return None  # without a background logit there is none to start from
        return tensor[self.labels]


def _delta_factors(model: Any, source: Source) -> tuple[float, float, float, float]:
    """Return the model's weights of box deltas, divided by the published ones."""
    if source.detector == "retinanet":
        coder, published = model.coder, "giou" if source.recipe["loss"]["name"] == "rs" else "l1"
    elif source.detector in ("faster_rcnn", "mask_rcnn", "cascade_rcnn"):
        coder, published = model.rpn.box_coder, "l1" if source.softmax else "giou"
    else:
        return 1.0, 1.0, 1.0, 1.0
    theirs = (10.0, 10.0, 5.0, 5.0) if published == "giou" else (1.0, 1.0, 1.0, 1.0)
    shift, _, size, _ = (own / other for own, other in zip(coder.weights, theirs, strict=True))
    return shift, shift, size, size
