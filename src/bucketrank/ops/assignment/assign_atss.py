"""Adaptive training sample selection (Zhang et al., CVPR 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bucketrank.ops.assignment.checks import check_boxes, check_levels, check_valid, precise, without_objects
from bucketrank.ops.boxes import centres, paired_iou

MARGIN = 0.01  # pixels by which a positive's centre must be inside its object


@torch.no_grad()
def assign_atss(
    anchors: Tensor, objects: Tensor, *, per_level: Sequence[int], topk: int = 9, valid: Tensor | None = None
) -> Tensor:
    """Assign to each object (G, 4) the anchors (A, 4) whose IoU stands out among the anchors nearest to it.

    1. The candidates of an object are, on each level, the ``topk`` anchors whose centres are nearest to the object's
       centre; of equal distances the first. Distances are compared in float32. ``per_level`` gives the number of
       anchors on each level, in order. Anchors that are not ``valid`` are never candidates.
    2. The threshold of an object is the mean plus the standard deviation of its candidates' IoUs. The deviation is that
       of a sample: divided by n - 1, and 0 if n is 1.
    3. A candidate is positive if its IoU reaches the threshold and its centre is inside the object by more than 0.01
       pixels. If several objects claim an anchor, it goes to the one with the highest IoU; of equal ones the first.

    All other anchors are negative, or ignored if they are not ``valid``.

    Takes O(A G) time, and memory for the distances on the largest level.

    >>> anchors = torch.tensor([[0.0, 0, 4, 4], [4, 0, 8, 4], [8, 0, 12, 4], [12, 0, 16, 4]])
    >>> objects = torch.tensor([[3.0, 0, 9, 4]])  # IoU 1/9, 4/6, 1/9 with the first three: mean 0.30, deviation 0.32
    >>> assign_atss(anchors, objects, per_level=[4], topk=3)
    tensor([-1,  0, -1, -1])
    """
    name = "assign_atss"
    check_boxes(name, anchors=anchors, objects=objects)
    check_levels(name, per_level, len(anchors), topk)
    check_valid(name, valid, len(anchors))
    assignment = without_objects(anchors, valid)
    if not len(anchors) or not len(objects):
        return assignment

    dtype = torch.promote_types(torch.promote_types(anchors.dtype, objects.dtype), torch.float32)
    anchors, objects = anchors.to(dtype), objects.to(dtype)
    points = centres(anchors)
    nearest = _nearest(points, centres(objects), per_level, topk, valid)  # (G, K)
    usable = torch.ones_like(nearest, dtype=torch.bool) if valid is None else valid[nearest]
    overlaps = paired_iou(anchors[nearest], objects[:, None])

    # In float64 the mean of equal float32 numbers is exact, so that anchors of equal IoU all reach it.
    values = precise(overlaps)
    count = usable.sum(1, keepdim=True)
    mean = values.where(usable, 0).sum(1, keepdim=True) / count.clamp(min=1)
    squares = (values - mean).where(usable, 0).square().sum(1, keepdim=True)
    threshold = mean + (squares / (count - 1).clamp(min=1)).sqrt()

    sides = torch.cat([points[nearest] - objects[:, None, :2], objects[:, None, 2:] - points[nearest]], -1)
    positive = usable & (values >= threshold) & (sides.amin(-1) > MARGIN)
    return _best_owner(assignment, nearest, overlaps, positive)


def _nearest(points: Tensor, targets: Tensor, per_level: Sequence[int], topk: int, valid: Tensor | None) -> Tensor:
    """Return the indices (G, K) of the ``topk`` points nearest to each of G object centres on each level."""
    chosen, first = [], 0
    for count in per_level:
        level = slice(first, first + count)
        x, y = points[level].T
        distances = ((targets[:, :1] - x).square_() + (targets[:, 1:] - y).square_()).float()
        if valid is not None:
            distances.masked_fill_(~valid[level], torch.inf)
        # Non-negative floats sort like their bits. The index in the low bits breaks ties equally on every device.
        index = torch.arange(count, device=points.device)
        keys = (distances.view(torch.int32).long() << 32) | index
        chosen.append(keys.topk(min(topk, count), largest=False).indices + first)
        first += count
    return torch.cat(chosen, 1)


def _best_owner(assignment: Tensor, anchors: Tensor, overlaps: Tensor, positive: Tensor) -> Tensor:
    """Return ``assignment`` (A,) with the object (row) of each positive anchor of ``anchors`` (G, K).

    If several objects claim an anchor, the one with the highest overlap gets it; of equal ones the first.
    """
    flat = anchors.flatten()
    best = overlaps.new_full(assignment.shape, -1)
    best = best.scatter_reduce(0, flat, overlaps.where(positive, -1).flatten(), "amax")
    winners = positive & (overlaps == best[anchors])
    unclaimed = len(anchors)
    rows = torch.arange(unclaimed, device=anchors.device)[:, None].expand_as(anchors).where(winners, unclaimed)
    owner = torch.full_like(assignment, unclaimed).scatter_reduce(0, flat, rows.flatten(), "amin")
    return torch.where(owner < unclaimed, owner, assignment)
