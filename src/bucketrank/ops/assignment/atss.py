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
    """Give each object (G, 4) the anchors (A, 4) that stand out among those nearest to it.

    The nearest are, of each level (``per_level`` anchors each, in order), the ``topk`` whose centres lie nearest to the
    object's, of equal ones the first; distances are compared in float32. Positive are those of an IoU of at least the
    mean plus the standard deviation (of a sample: divided by n - 1; 0 if n is 1) of the IoUs of the nearest, if their
    centre is inside the object by more than 0.01 pixels. An anchor wanted by several objects goes to the one it
    overlaps most, of equal ones the first. All others are negative; those not ``valid`` are ignored, and never among
    the nearest.

    O(A G) time, and memory for the distances of the largest level.

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

    # In float64 the mean of equal float32 numbers is that number, so anchors that overlap alike all reach it.
    values = precise(overlaps)
    count = usable.sum(1, keepdim=True)
    mean = values.where(usable, 0).sum(1, keepdim=True) / count.clamp(min=1)
    squares = (values - mean).where(usable, 0).square().sum(1, keepdim=True)
    threshold = mean + (squares / (count - 1).clamp(min=1)).sqrt()

    sides = torch.cat([points[nearest] - objects[:, None, :2], objects[:, None, 2:] - points[nearest]], -1)
    positive = usable & (values >= threshold) & (sides.amin(-1) > MARGIN)
    return _best_owner(assignment, nearest, overlaps, positive)


def _nearest(points: Tensor, middles: Tensor, per_level: Sequence[int], topk: int, valid: Tensor | None) -> Tensor:
    """For each of G middles the indices (G, K) of the ``topk`` points nearest to it on each level."""
    chosen, first = [], 0
    for count in per_level:
        level = slice(first, first + count)
        x, y = points[level].T
        distances = ((middles[:, :1] - x).square_() + (middles[:, 1:] - y).square_()).float()
        if valid is not None:
            distances.masked_fill_(~valid[level], torch.inf)
        # A float that is not negative orders as its bits do; the index below them settles ties, on every device alike.
        index = torch.arange(count, device=points.device)
        keys = (distances.view(torch.int32).long() << 32) | index
        chosen.append(keys.topk(min(topk, count), largest=False).indices + first)
        first += count
    return torch.cat(chosen, 1)


def _best_owner(assignment: Tensor, anchors: Tensor, overlaps: Tensor, wanted: Tensor) -> Tensor:
    """Enter into ``assignment`` (A,) the row of each wanted anchor (G, K), where rows compete the highest overlap."""
    flat = anchors.flatten()
    best = overlaps.new_full(assignment.shape, -1)
    best = best.scatter_reduce(0, flat, overlaps.where(wanted, -1).flatten(), "amax")
    winners = wanted & (overlaps == best[anchors])
    nobody = len(anchors)
    rows = torch.arange(nobody, device=anchors.device)[:, None].expand_as(anchors).where(winners, nobody)
    owner = torch.full_like(assignment, nobody).scatter_reduce(0, flat, rows.flatten(), "amin")
    return torch.where(owner < nobody, owner, assignment)
