"""From scored boxes to detections."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection._utils import _topk_min
from torchvision.ops import batched_nms, box_iou, remove_small_boxes

SMALLEST_SIDE = 1e-2  # of a detection, in pixels


def best_entries(scores: Tensor, *, most: int, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """The ``most`` highest of ``scores`` (R, C) above ``threshold``: their scores, rows and columns.

    The detectors' threshold is 0 unless set. Scores trained by ranking say which detection is better, and nothing else:
    all of them may lie below any limit that suits probabilities.
    """
    flat = scores.flatten()
    values, order = flat.topk(_topk_min(flat, most, 0))
    above = values > threshold
    values, order = values[above], order[above]
    return values, order // scores.shape[1], order % scores.shape[1]


def without_duplicates(
    boxes: Tensor, scores: Tensor, labels: Tensor, *, iou: float, most: int, vote: bool = False
) -> dict[str, Tensor]:
    """Non-maximum suppression within each class; with ``vote`` the boxes kept are moved by those around them.

    Boxes that clipping has left without area are not detections.
    """
    solid = remove_small_boxes(boxes, SMALLEST_SIDE)
    boxes, scores, labels = boxes[solid], scores[solid], labels[solid]
    keep = batched_nms(boxes, scores, labels, iou)[:most]
    kept = voted(boxes, scores, labels, keep) if vote else boxes[keep]
    return {"boxes": kept, "scores": scores[keep], "labels": labels[keep]}


def voted(boxes: Tensor, scores: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
    """Score voting (PAA): the mean of the boxes of the same class, by ``score * exp(-(1 - IoU)^2 / 0.025)``.

    Boxes that overlap by an IoU of 0.01 or less have no vote.
    """
    overlaps = box_iou(boxes[keep], boxes)
    votes = scores * torch.exp(-((1 - overlaps) ** 2) / 0.025)
    votes = votes * ((overlaps > 0.01) & (labels[keep][:, None] == labels))
    moved: Tensor = (votes @ boxes) / votes.sum(1, keepdim=True)
    return moved
