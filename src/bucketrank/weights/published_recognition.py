"""Recognise the detector of a published checkpoint from tensor names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bucketrank.errors import WeightsError, require_choice
from bucketrank.weights.published_file import Checkpoint
from bucketrank.weights.published_table import HEAD_ROWS, MMDET_SWIN, RESNET, SWIN, co_detr_rows
from bucketrank.weights.tensor_table import Row

DETECTORS = "atss, paa, retinanet, faster_rcnn, mask_rcnn, cascade_rcnn, co_detr, co_dino"
RESNET_DEPTHS: dict[tuple[int, ...], int] = {(3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152}
SWIN_NAMES: dict[tuple[int, tuple[int, ...]], str] = {
    (96, (2, 2, 6, 2)): "swin_tiny",
    (192, (2, 2, 18, 2)): "swin_large",
}
LVIS_CLASSES = 1203
# Co-DINO from Objects365: its configuration has other test images.
LARGE_IMAGES = r"scale=\(2048, 1280\)|_o365tococo"
ATTENTION_HEADS = 8
DINO = ("query_head.dn_generator.", "query_head.transformer.decoder.ref_point_head.")  # in Co-DINO, not in Co-DETR
# Classification layers of other detectors, by the start of their names, and what to say about them.
OTHERS = {
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
    transformer = "query_head.cls_branches.0.weight" in state
    dino = any(key.startswith(DINO) for key in state)
    if transformer:
        name, num_classes, softmax, loss = _co_detr(state, groups, dino=dino)
    elif prefix := next((each for each in ("retina", "atss") if f"bbox_head.{each}_cls.weight" in state), ""):
        anchors = len(state[f"bbox_head.{prefix}_reg.weight"]) // 4
        num_classes, softmax = len(state[f"bbox_head.{prefix}_cls.weight"]) // anchors, False
        if prefix == "retina":
            name, loss = "retinanet", "rs" if anchors == 6 else "focal"
            count = {"scales": anchors // 3}
        else:
            name = _atss_or_paa(checkpoint, detector)
            loss = "focal" if "bbox_head.atss_centerness.weight" in state else "rs"
            count = {"anchors": anchors}
        convs = _count(state, r"bbox_head\.cls_convs\.(\d+)\.")
        groups["detector"] = {**count, "convs": convs, "score_threshold": 0.05}
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
    if transformer:
        width = state["query_head.transformer.level_embeds"].shape[1]
        rows = co_detr_rows(groups["detector"]["decoder_layers"], dino=dino)
    else:
        width, rows = len(state["neck.lateral_convs.0.conv.weight"]), HEAD_ROWS[name]
    groups["detector"] = {"name": name, "channels": width} | groups["detector"]
    groups["loss"] = {"name": loss}
    if dino and checkpoint.mentions(LARGE_IMAGES):
        groups["inputs"] = {"min_size": 1280, "max_size": 2048}
    return Source(name, groups, num_classes, softmax, table=(*backbone_rows, *rows))


def _atss_or_paa(checkpoint: Checkpoint, detector: str | None) -> str:
    """Return which of the two a checkpoint is: their tensors have the same names and shapes."""
    if detector is not None:
        require_choice("detector", detector, ("atss", "paa"))
        return detector
    word = r"(?i)(?<![a-z]){}(?:head)?(?![a-z])"
    mentioned = [name for name in ("atss", "paa") if checkpoint.mentions(word.format(name))]
    if len(mentioned) != 1:
        raise WeightsError(
            f"{checkpoint.path}: expected a configuration or a file name that tells ATSS from PAA, whose tensors "
            "have the same names, got none; add --detector atss or --detector paa"
        )
    return mentioned[0]


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
    masks = "roi_head.mask_head.conv_logits.weight" in state
    name = "cascade_rcnn" if cascade else "mask_rcnn" if masks else "faster_rcnn"
    lvis = num_classes == LVIS_CLASSES
    groups["detector"] = {
        "hidden": len(state[f"{head}.shared_fcs.0.weight"]),
        # The published thresholds. A box head trained by ranking starts at scores of 0.5.
        "score_threshold": (0.0001 if lvis else 0.05) if softmax else (0.6 if lvis else 0.4),
        "detections": 300 if lvis else 100,
    }
    return name, num_classes, softmax, "ce" if softmax else "rs"


def _co_detr(
    state: Mapping[str, Tensor], groups: dict[str, dict[str, Any]], *, dino: bool
) -> tuple[str, int, bool, str]:
    num_classes = len(state["query_head.cls_branches.0.weight"])
    transformer = "query_head.transformer"
    attention = f"{transformer}.encoder.layers.0.attentions.0.attention_weights.weight"
    levels = len(state[f"{transformer}.level_embeds"])
    softmax = len(state["roi_head.0.bbox_head.fc_cls.weight"]) == num_classes + 1
    queries = f"{transformer}.query_embed.weight" if dino else "query_head.query_embedding.weight"
    groups["detector"] = {
        **({} if dino else {"published": True}),
        "levels": levels,
        "queries": len(state[queries]),
        "encoder_layers": _count(state, rf"{re.escape(transformer)}\.encoder\.layers\.(\d+)\."),
        "decoder_layers": _count(state, rf"{re.escape(transformer)}\.decoder\.layers\.(\d+)\."),
        "heads": ATTENTION_HEADS,
        "points": len(state[attention]) // (levels * ATTENTION_HEADS),
        "feedforward": len(state[f"{transformer}.encoder.layers.0.ffns.0.layers.0.0.weight"]),
        "hidden": len(state["roi_head.0.bbox_head.shared_fcs.0.weight"]),
    }
    scored = "qfl" if dino else "focal"
    return "co_dino" if dino else "co_detr", num_classes, softmax, scored if softmax else "rs"


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
