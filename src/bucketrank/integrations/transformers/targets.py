"""Checks of the targets that a training step passes to a model as ``labels``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KEYS = ("class_labels", "boxes")
TENSORS = "a dict with the tensors class_labels and boxes"
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_targets(targets: Any, *, images: int, classes: int) -> None:
    """Raise unless ``targets`` has one target for each image, with one class label for each box.

    Values are checked only if they are on the CPU: elsewhere the check would cost a device sync in every step.
    """
    if not isinstance(targets, (list, tuple)) or len(targets) != images:
        got = f"{len(targets)} targets" if isinstance(targets, (list, tuple)) else type(targets).__name__
        raise ValueError(f"use_ranking_loss: expected labels with one target for each of {images} images, got {got}")
    for index, target in enumerate(targets):
        _check_target(target, f"labels[{index}]", classes)


def _check_target(target: Any, name: str, classes: int) -> None:
    if not isinstance(target, Mapping):
        raise TypeError(f"use_ranking_loss: expected {name} to be {TENSORS}, got {type(target).__name__}")
    for key in KEYS:
        if not isinstance(target.get(key), Tensor):
            got = type(target[key]).__name__ if key in target else f"the keys {', '.join(map(str, target))}"
            raise TypeError(f"use_ranking_loss: expected {name} to be {TENSORS}, got {got}; add {key}")
    labels, boxes = target["class_labels"], target["boxes"]
    if labels.dtype not in INTEGERS:
        raise TypeError(
            f"use_ranking_loss: expected {name}['class_labels'] of an integer dtype, got {labels.dtype}; "
            "convert them with .long()"
        )
    if labels.ndim != 1 or (boxes.shape != (len(labels), 4) and (boxes.numel() > 0 or len(labels) > 0)):
        raise ValueError(
            f"use_ranking_loss: expected {name} with class_labels of shape (n,) and boxes of shape (n, 4), got "
            f"{tuple(labels.shape)} and {tuple(boxes.shape)}; give every box one class label"
        )
    if labels.numel() and labels.device.type == "cpu":
        _check_labels(labels, name, classes)
    if boxes.numel() and boxes.device.type == "cpu":
        _check_boxes(boxes, name)


def _check_labels(labels: Tensor, name: str, classes: int) -> None:
    lowest, highest = torch.stack(labels.aminmax()).tolist()
    if lowest < 0 or highest >= classes:
        raise ValueError(
            f"use_ranking_loss: expected {name}['class_labels'] from 0 to {classes - 1}, got "
            f"{lowest if lowest < 0 else highest}; correct them, or build the model with more labels"
        )


def _check_boxes(boxes: Tensor, name: str) -> None:
    wrong = ~boxes.isfinite().all(1) | (boxes[:, 2:] < 0).any(1)
    if wrong.any():
        raise ValueError(
            f"use_ranking_loss: expected {name}['boxes'] as finite, relative (cx, cy, w, h) with sizes of at least 0, "
            f"got {boxes[wrong][0].tolist()}; correct them"
        )
