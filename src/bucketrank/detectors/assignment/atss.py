"""Adaptive training sample selection (Zhang et al., CVPR 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bucketrank.boxes import centres, paired_iou
from bucketrank.detectors.assignment.checks import IGNORED, NEGATIVE, check_boxes, check_levels, check_valid
from bucketrank.losses.comparison import precise

BLOCK = 1 << 22  # anchor-object pairs compared at once; bounds the memory
MARGIN = 0.01  # minimum distance in pixels of a positive's centre from its object's edges


@torch.no_grad()
def assign_atss(
    anchors: Tensor, objects: Sequence[Tensor], *, per_level: Sequence[int], topk: int = 9, valid: Tensor | None = None
) -> Tensor:
    """Assign to each object the anchors whose IoU stands out among those nearest to it; return (B, A) for B images.

    1. The candidates of an object are, on each level, the ``topk`` anchors whose centres are nearest to the object's
       centre; ties go to the first. Distances are compared in float32. Invalid anchors are never candidates.
    2. The threshold of an object is the mean plus the standard deviation of its candidates' IoUs. It is the sample
       deviation: divided by n - 1, and 0 if n is 1.
    3. A candidate is positive if its IoU reaches the threshold and its centre is inside the object by more than 0.01
       pixels. If several objects claim an anchor, the highest IoU wins; ties go to the first object.

    All other anchors are negative, or ignored if they are invalid.

    All images share the ``anchors`` (A, 4), ``per_level`` of them on each level, in order. ``objects`` holds the boxes
    (G, 4) of each image. Without the mask ``valid`` (B, A), all anchors are valid. The number of operations does not
    depend on the number of images, and none of them is a device sync. Takes O(A G) time for G objects in total; memory
    does not grow with G.

    >>> left = torch.tensor([0.0, 4, 8, 12])
    >>> anchors = torch.stack([left, left * 0, left + 4, left * 0 + 4], dim=1)
    >>> # The IoUs with the first three are 1/9, 4/6 and 1/9: mean 0.30, deviation 0.32.
    >>> objects = torch.tensor([[3.0, 0, 9, 4]])
    >>> assign_atss(anchors, [objects], per_level=[4], topk=3)
    tensor([[-1,  0, -1, -1]])
    """
    name = "assign_atss"
    check_boxes(name, anchors=anchors)
    for boxes in objects:
        check_boxes(name, objects=boxes)
    check_levels(name, per_level, len(anchors), topk)
    check_valid(name, valid, (len(objects), len(anchors)))
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

    # The mean of equal float32 numbers is exact in float64, so anchors of equal IoU all reach it.
    values = precise(overlaps)
    count = usable.sum(1, keepdim=True)
    mean = values.where(usable, 0).sum(1, keepdim=True) / count.clamp(min=1)
    squares = (values - mean).where(usable, 0).square().sum(1, keepdim=True)
    threshold = mean + (squares / (count - 1).clamp(min=1)).sqrt()

    near = points[nearest]
    sides = torch.cat([near - boxes[:, None, :2], boxes[:, None, 2:] - near], -1)
    positive = usable & (values >= threshold) & (sides.amin(-1) > MARGIN)
    rows = torch.cat(
        [torch.arange(count, device=anchors.device) for count in counts]
    )  # object indices within each image
    claimed = nearest + image[:, None] * len(anchors)
    return _best_owner(assignment.flatten(), claimed, overlaps, positive, rows).view_as(assignment)


def _nearest(
    points: Tensor, targets: Tensor, image: Tensor, per_level: Sequence[int], topk: int, valid: Tensor | None
) -> Tensor:
    """Find the ``topk`` points nearest to each of G object centres on each level: indices (G, K).

    ``image`` (G,) is the image index of each object, a row of ``valid``.
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
    """Write the object of each positive among ``anchors`` (G, K) into ``assignment`` (A,).

    ``rows`` (G,) are the object indices. If several objects claim an anchor, the highest overlap wins; ties go to the
    first object.
    """
    flat = anchors.flatten()
    best = overlaps.new_full(assignment.shape, -1)
    best = best.scatter_reduce_(0, flat, overlaps.where(positive, -1).flatten(), "amax")
    winners = positive & (overlaps == best[anchors])
    unclaimed = len(anchors)
    numbers = rows[:, None].expand_as(anchors).where(winners, unclaimed)
    owner = torch.full_like(assignment, unclaimed).scatter_reduce_(0, flat, numbers.flatten(), "amin")
    return torch.where(owner < unclaimed, owner, assignment)
