"""Assignment by IoU thresholds, as in RPN, RetinaNet and R-CNN heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bucketrank.boxes import paired_iou
from bucketrank.detectors.assignment.checks import IGNORED, NEGATIVE, check_boxes, check_valid, without_objects

BLOCK = 1 << 22  # candidate-object pairs compared at once; bounds the memory


@torch.no_grad()
def assign_max_iou(
    candidates: Tensor,
    objects: Tensor,
    *,
    positive: float,
    negative: float,
    low_quality: float | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Assign the ``candidates`` (A, 4) to the ``objects`` (G, 4) they overlap most, by two thresholds on that IoU.

    A candidate whose highest IoU is below ``negative`` is negative. One that reaches ``positive`` is assigned to the
    object of that IoU; of equal ones the first. In between it is ignored.

    With ``low_quality``, each object then claims the candidates that tie for its own highest IoU, if that IoU is above
    0 and at least ``low_quality``. A claim overrides the thresholds; of two objects that claim a candidate, the later
    gets it. Candidates that are not ``valid`` (A,) are ignored and never claimed; by default all are valid.

    Takes O(A G) time; memory does not grow with G.

    >>> objects = torch.tensor([[0.0, 0, 4, 4]])
    >>> # The IoUs of the candidates with the object are 1, 1/2, 1/4 and 0.
    >>> sides = torch.tensor([[4.0, 4], [4, 2], [2, 2], [0, 0]])
    >>> candidates = torch.cat([torch.zeros(4, 2), sides], dim=1)
    >>> assign_max_iou(candidates, objects, positive=0.7, negative=0.3)
    tensor([ 0, -2, -1, -1])
    """
    name = "assign_max_iou"
    check_boxes(name, candidates=candidates, objects=objects)
    check_valid(name, valid, (len(candidates),))
    if not 0 <= negative <= positive <= 1:
        raise ValueError(
            f"{name}: expected 0 <= negative <= positive <= 1, got negative {negative!r}, positive {positive!r}"
        )
    if low_quality is not None and not 0 <= low_quality <= 1:
        raise ValueError(f"{name}: expected low_quality to be None or from 0 to 1, got {low_quality!r}")
    assignment = without_objects(candidates, valid)
    if not len(candidates) or not len(objects):
        return assignment

    dtype = torch.promote_types(torch.promote_types(candidates.dtype, objects.dtype), torch.float32)
    candidates, objects = candidates.to(dtype), objects.to(dtype)
    best = candidates.new_full((len(candidates),), -1)
    owner, claimed = torch.zeros_like(assignment), torch.full_like(assignment, NEGATIVE)
    numbers = torch.arange(len(objects), device=objects.device)[:, None]
    step = max(1, BLOCK // len(candidates))
    for start in range(0, len(objects), step):
        block = slice(start, start + step)
        overlaps = paired_iou(candidates, objects[block, None])  # (objects of the block, A)
        if valid is not None:
            overlaps.masked_fill_(~valid, -1)
        highest, index = overlaps.max(0)
        owner = torch.where(highest > best, index + start if start else index, owner)
        best = torch.maximum(best, highest)
        if low_quality is not None:
            reached = overlaps.amax(1, keepdim=True)
            ties = (overlaps == reached) & (reached >= low_quality) & (reached > 0)
            claimed = torch.maximum(claimed, torch.where(ties, numbers[block], NEGATIVE).amax(0))

    if negative < positive:
        owner = owner.masked_fill_(best < positive, IGNORED)
    owner = owner.masked_fill_(best < negative, NEGATIVE)
    if low_quality is not None:
        owner = torch.where(claimed >= 0, claimed, owner)
    return owner if valid is None else torch.where(assignment == IGNORED, assignment, owner)


def assign_each_image(
    anchors: Tensor, ground_truths: Sequence[dict[str, Tensor]], valid: Tensor, **thresholds: Any
) -> list[Tensor]:
    """Call :func:`assign_max_iou` for each image of a batch; all share the anchors, and ``valid`` is (B, A)."""
    return [
        assign_max_iou(anchors, ground_truth["boxes"], valid=valid_here, **thresholds)
        for ground_truth, valid_here in zip(ground_truths, valid, strict=True)
    ]
