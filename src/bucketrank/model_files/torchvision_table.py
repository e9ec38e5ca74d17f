"""The table of tensors of torchvision's detectors, and of the tensors of our detectors that they become."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

# How a tensor changes on its way. torchvision's labels count the background as label 0; our classes do not.
Change = Literal[
    "none",
    "variance",  # of a batch norm, for our epsilon
    "deltas",  # (4 * anchors, ...) rows of box deltas, for our weights of the deltas
    "classes",  # (labels, ...) with the background first; ours has it last, or not at all
    "class_boxes",  # (4 * labels, ...)
    "class_masks",  # (labels, ...)
    "anchor_classes",  # (anchors * labels, ...)
]
CLASS_CHANGES = ("classes", "class_boxes", "class_masks", "anchor_classes")  # of layers that depend on the classes


@dataclass(frozen=True)
class TableRow:
    """A pattern of torchvision's names, our name with the groups of the pattern, and the change of the tensor."""

    pattern: str
    name: str
    change: Change = "none"

    @cached_property
    def expression(self) -> re.Pattern[str]:
        return re.compile(self.pattern)


@dataclass(frozen=True)
class TensorTable:
    """The rows for one of our detectors, the model of torchvision it equals, and the settings that make it equal."""

    model: str
    flags: str
    rows: tuple[TableRow, ...]

    def translated(self, name: str) -> tuple[str, Change] | None:
        """Return our name of torchvision's tensor ``name`` and the change of the tensor; None for an unknown name."""
        for row in self.rows:
            if match := row.expression.fullmatch(name):
                return match.expand(row.name), row.change
        return None


# Checkpoints from before torchvision 0.13 lack some of the numbers in today's names, and the COCO weights are such
# checkpoints: the pyramid's "inner_blocks.0.weight" is "inner_blocks.0.0.weight" today.
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

RCNN_FLAGS = "--backbone.name resnet50 --detector.channels 256 --detector.hidden 1024"
TABLES = {  # by the name of our detector
    "faster_rcnn": TensorTable("fasterrcnn_resnet50_fpn", RCNN_FLAGS, FASTER_RCNN),
    "mask_rcnn": TensorTable("maskrcnn_resnet50_fpn", RCNN_FLAGS, MASK_RCNN),
    "retinanet": TensorTable(
        "retinanet_resnet50_fpn",
        "--backbone.name resnet50 --detector.channels 256 --detector.convs 4 --detector.scales 3 "
        "--detector.extra_levels p5_relu",
        RETINANET,
    ),
}

# Models of torchvision whose architecture none of our detectors has, and why.
OTHER_ARCHITECTURES = {
    "fasterrcnn_resnet50_fpn_v2": "its pyramid has norms, its RPN two convolutions and its box head four",
    "maskrcnn_resnet50_fpn_v2": "its pyramid has norms, its RPN two convolutions and its box head four",
    "retinanet_resnet50_fpn_v2": "its head has group norms",
}
