"""Adaptive training sample selection (Zhang et al., CVPR 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bucketrank.boxes import centres, paired_iou
from bucketrank.detectors.assignment.checks import IGNORED, NEGATIVE, check_boxes, check_levels, check_valid, precise

BLOCK = 1 << 22  # pairs of anchor and object compared at once; bounds the memory
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

    Takes O(A G) time; the memory does not grow with G.

    Args:
        anchors: boxes (A, 4) of the anchors.
        objects: boxes (G, 4) of the objects.
        per_level: number of anchors on each level.
        topk: candidates per object and level.
        valid: which anchors take part (A,); by default all.

    >>> left = torch.tensor([0.0, 4, 8, 12])
    >>> anchors = torch.stack([left, left * 0, left + 4, left * 0 + 4], dim=1)
    >>> # The IoUs with the first three are 1/9, 4/6 and 1/9: mean 0.30, deviation 0.32.
    >>> objects = torch.tensor([[3.0, 0, 9, 4]])
    >>> assign_atss(anchors, objects, per_level=[4], topk=3)
    tensor([-1,  0, -1, -1])
    """
    name = "assign_atss"
    check_boxes(name, anchors=anchors, objects=objects)
    check_levels(name, per_level, len(anchors), topk)
    check_valid(name, valid, len(anchors))
    return assign_atss_batch(
        anchors, [objects], per_level=per_level, topk=topk, valid=None if valid is None else valid[None]
    )[0]


@torch.no_grad()
def assign_atss_batch(
    anchors: Tensor, objects: Sequence[Tensor], *, per_level: Sequence[int], topk: int = 9, valid: Tensor | None = None
) -> Tensor:
    """Return the assignments (B, A) of B images, as :func:`assign_atss` computes each.

    All images have the same anchors (A, 4); ``valid`` is (B, A). The operations and their number are those of one
    image, and none of them makes the host wait for the device.

    Args:
        anchors: boxes (A, 4) of the anchors.
        objects: boxes (G, 4) of the objects of each image.
        per_level: number of anchors on each level.
        topk: candidates per object and level.
        valid: which anchors take part (B, A); by default all.
    """
    name = "assign_atss"
    check_boxes(name, anchors=anchors)
    for boxes in objects:
        check_boxes(name, objects=boxes)
    check_levels(name, per_level, len(anchors), topk)
    assignment = torch.full((len(objects), len(anchors)), NEGATIVE, device=anchors.device)
    if valid is not None:
        assignment = assignment.masked_fill_(~valid, IGNORED)
    boxes = torch.cat(list(objects))  # (G, 4) of all images
    if not len(anchors) or not len(boxes):
        return assignment

    dtype = torch.promote_types(torch.promote_types(anchors.dtype, boxes.dtype), torch.float32)
    anchors, boxes = anchors.to(dtype), boxes.to(dtype)
    points = centres(anchors)
    counts = [len(each) for each in objects]
    image = torch.cat([torch.full((count,), number, device=anchors.device) for number, count in enumerate(counts)])
    nearest = _nearest(points, centres(boxes), image, per_level, topk, valid)  # (G, K)
    usable = torch.ones_like(nearest, dtype=torch.bool) if valid is None else valid[image[:, None], nearest]
    overlaps = paired_iou(anchors[nearest], boxes[:, None])

    # In float64 the mean of equal float32 numbers is exact, so that anchors of equal IoU all reach it.
    values = precise(overlaps)
    count = usable.sum(1, keepdim=True)
    mean = values.where(usable, 0).sum(1, keepdim=True) / count.clamp(min=1)
    squares = (values - mean).where(usable, 0).square().sum(1, keepdim=True)
    threshold = mean + (squares / (count - 1).clamp(min=1)).sqrt()

    near = points[nearest]
    sides = torch.cat([near - boxes[:, None, :2], boxes[:, None, 2:] - near], -1)
    positive = usable & (values >= threshold) & (sides.amin(-1) > MARGIN)
    rows = torch.cat([torch.arange(count, device=anchors.device) for count in counts])  # numbers of the objects
    claimed = nearest + image[:, None] * len(anchors)
    return _best_owner(assignment.flatten(), claimed, overlaps, positive, rows).view_as(assignment)


def _nearest(
    points: Tensor, targets: Tensor, image: Tensor, per_level: Sequence[int], topk: int, valid: Tensor | None
) -> Tensor:
    """Return the indices (G, K) of the ``topk`` points nearest to each of G object centres on each level.

    ``image`` (G,) is the image of each object, a row of ``valid``.
    """
    x, y = points.T
    index = torch.arange(len(points), device=points.device)
    invalid = None if valid is None else ~valid
    step = max(1, BLOCK // len(points))
    chosen = []
    for start in range(0, len(targets), step):
        block = slice(start, start + step)
        distances = (targets[block, :1] - x).square_().add_((targets[block, 1:] - y).square_()).float()
        if invalid is not None:
            distances.masked_fill_(invalid if len(invalid) == 1 else invalid[image[block]], torch.inf)
        # Non-negative floats sort like their bits. The index in the low bits breaks ties equally on every device.
        keys = distances.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(index)
        levels = [
            level.topk(min(topk, count), largest=False).values
            for level, count in zip(keys.split(list(per_level), 1), per_level, strict=True)
        ]
        chosen.append(torch.cat(levels, 1).bitwise_and_(0xFFFFFFFF))
    return torch.cat(chosen)


def _best_owner(assignment: Tensor, anchors: Tensor, overlaps: Tensor, positive: Tensor, rows: Tensor) -> Tensor:
    """Return ``assignment`` (A,) with the object of each positive anchor of ``anchors`` (G, K).

    The objects have the numbers ``rows`` (G,). If several objects claim an anchor, the one with the highest overlap
    gets it; of equal ones the first.
    """
    flat = anchors.flatten()
    best = overlaps.new_full(assignment.shape, -1)
    best = best.scatter_reduce_(0, flat, overlaps.where(positive, -1).flatten(), "amax")
    winners = positive & (overlaps == best[anchors])
    unclaimed = len(anchors)
    numbers = rows[:, None].expand_as(anchors).where(winners, unclaimed)
    owner = torch.full_like(assignment, unclaimed).scatter_reduce_(0, flat, numbers.flatten(), "amin")
    return torch.where(owner < unclaimed, owner, assignment)
