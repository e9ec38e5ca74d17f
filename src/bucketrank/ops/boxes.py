"""What is asked of boxes: how much two overlap, where the middle is, how central a point lies."""

from __future__ import annotations

import torch
from torch import Tensor


def paired_iou(boxes: Tensor, objects: Tensor, *, smallest_union: float = 1e-6) -> Tensor:
    """The IoU of each box with the object in the same place; torchvision's ``box_iou`` would compare all pairs.

    Both are (..., 4) and broadcast: ``paired_iou(boxes, objects[:, None])`` does compare all pairs. The union counts as
    ``smallest_union`` at least, so two boxes without area have IoU 0; boxes in units of the image need a smaller one.

    >>> paired_iou(torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[1.0, 0, 3, 2]]))  # 2 shared of 4 + 4 - 2
    tensor([0.3333])
    """
    left, top, right, bottom = boxes.unbind(-1)
    other_left, other_top, other_right, other_bottom = objects.unbind(-1)
    width = (torch.minimum(right, other_right) - torch.maximum(left, other_left)).clamp(min=0)
    height = (torch.minimum(bottom, other_bottom) - torch.maximum(top, other_top)).clamp(min=0)
    shared = width * height
    areas = (right - left) * (bottom - top) + (other_right - other_left) * (other_bottom - other_top)
    return shared / (areas - shared).clamp(min=smallest_union)


def centres(boxes: Tensor) -> Tensor:
    """The middle (x, y) of each box: (..., 4) to (..., 2)."""
    return (boxes[..., :2] + boxes[..., 2:]) / 2


def centerness(points: Tensor, objects: Tensor) -> Tensor:
    """How near each point (P, 2) lies to the middle of the object (P, 4) in the same row (Tian et al., 2019, Eq. 3).

    ``sqrt(min(l, r) / max(l, r) * min(t, b) / max(t, b))`` of the distances to the four sides: 1 in the middle, 0 on
    the border and outside.

    >>> centerness(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0, 5, 4]]))  # sqrt(1/4 * 2/2)
    tensor([0.5000])
    """
    before, after = points - objects[..., :2], objects[..., 2:] - points
    least, most = torch.minimum(before, after).clamp(min=0), torch.maximum(before, after)
    # Where the object has no extent the least is 0 too, and so is the share.
    return (least / most.masked_fill(most <= 0, 1)).prod(-1).sqrt()
