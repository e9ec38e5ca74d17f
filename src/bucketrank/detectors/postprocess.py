"""Postprocessing: scored boxes to detections."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection._utils import _topk_min
from torchvision.ops import batched_nms, box_iou, remove_small_boxes

SMALLEST_SIDE = 1e-2  # of a detection, in pixels


def best_entries(scores: Tensor, *, limit: int, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the at most ``limit`` highest of ``scores`` (R, C) above ``threshold``: values, rows and columns.

    The detectors' default threshold is 0. A ranking loss trains the order of the scores, not their values: all scores
    may lie below a threshold that suits probabilities.
    """
    flat = scores.flatten()
    values, order = flat.topk(_topk_min(flat, limit, 0))
    above = values > threshold
    values, order = values[above], order[above]
    return values, order // scores.shape[1], order % scores.shape[1]


def without_duplicates(
    boxes: Tensor, scores: Tensor, labels: Tensor, *, iou: float, limit: int, vote: bool = False
) -> dict[str, Tensor]:
    """Apply non-maximum suppression within each class and return at most ``limit`` detections.

    With ``vote``, score voting moves the remaining boxes. Boxes without area after clipping are dropped.
    """
    solid = remove_small_boxes(boxes, SMALLEST_SIDE)
    boxes, scores, labels = boxes[solid], scores[solid], labels[solid]
    keep = batched_nms(boxes, scores, labels, iou)[:limit]
    kept_boxes = voted_boxes(boxes, scores, labels, keep) if vote else boxes[keep]
    return {"boxes": kept_boxes, "scores": scores[keep], "labels": labels[keep]}


def voted_boxes(boxes: Tensor, scores: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
    """Return the boxes ``keep`` after score voting (PAA).

    Each becomes the mean of the boxes of its class, weighted by ``score * exp(-(1 - IoU)^2 / 0.025)``. Boxes with an
    IoU of 0.01 or less have no weight.
    """
    overlaps = box_iou(boxes[keep], boxes)
    votes = scores * torch.exp(-((1 - overlaps) ** 2) / 0.025)
    votes = votes * ((overlaps > 0.01) & (labels[keep][:, None] == labels))
    # Autocast would multiply in half precision, which rounds boxes to several pixels.
    with torch.autocast(boxes.device.type, enabled=False):
        moved: Tensor = (votes @ boxes) / votes.sum(1, keepdim=True)
    return moved
