"""Box geometry in plain torch: paired IoU, GIoU loss, centres and centerness."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-7  # added to the areas that the GIoU loss divides by


def paired_iou(boxes: Tensor, objects: Tensor, *, min_union: float = 1e-6) -> Tensor:
    """Compute the IoU of each box with the object at the same index; torchvision's ``box_iou`` compares all pairs.

    Both are (..., 4) and broadcast: ``paired_iou(boxes, objects[:, None])`` compares all pairs. The union is clamped to
    at least ``min_union``, so that two boxes without area have IoU 0. Choose a smaller value for boxes in relative
    coordinates.

    >>> paired_iou(torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[1.0, 0, 3, 2]]))  # 2 shared of 4 + 4 - 2
    tensor([0.3333])
    """
    left, top, right, bottom = boxes.unbind(-1)
    other_left, other_top, other_right, other_bottom = objects.unbind(-1)
    width = (torch.minimum(right, other_right) - torch.maximum(left, other_left)).clamp(min=0)
    height = (torch.minimum(bottom, other_bottom) - torch.maximum(top, other_top)).clamp(min=0)
    shared = width * height
    areas = (right - left) * (bottom - top) + (other_right - other_left) * (other_bottom - other_top)
    return shared / (areas - shared).clamp(min=min_union)


def giou_loss(boxes: Tensor, objects: Tensor) -> Tensor:
    """Compute the GIoU loss (P,) of each box (P, 4) with the object in the same row (Rezatofighi et al., CVPR 2019).

    Values and gradients equal those of torchvision's ``generalized_box_iou_loss``, whose boolean masks cause a device
    sync.

    >>> giou_loss(torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[2.0, 0, 4, 2]]))  # IoU 0, nothing else enclosed
    tensor([1.])
    """
    corner, far = boxes.chunk(2, 1)
    object_corner, object_far = objects.chunk(2, 1)
    shared_sides = torch.minimum(far, object_far) - torch.maximum(corner, object_corner)
    # Not a clamp: where two boxes only touch, the gradient is 0.
    shared = _area(shared_sides).where((shared_sides > 0).all(1), 0)
    union = _area(far - corner) + _area(object_far - object_corner) - shared
    # Split again, so that gradients are added up in torchvision's order and have the same bits.
    corner, far = boxes.chunk(2, 1)
    enclosing = _area(torch.maximum(far, object_far) - torch.minimum(corner, object_corner))
    return 1 - (shared / (union + TINY) - (enclosing - union) / (enclosing + TINY))


def _area(sides: Tensor) -> Tensor:
    width, height = sides.unbind(-1)
    return width * height


def centres(boxes: Tensor) -> Tensor:
    """Compute the centre (x, y) of each box: (..., 4) to (..., 2)."""
    return (boxes[..., :2] + boxes[..., 2:]) / 2


def centerness(points: Tensor, objects: Tensor) -> Tensor:
    """Compute the centerness of each point (P, 2) in the object (P, 4) in the same row (Tian et al., 2019, Eq. 3).

    With l, r, t and b the distances to the four sides: ``sqrt(min(l, r) / max(l, r) * min(t, b) / max(t, b))``.
    It is 1 at the centre, and 0 on the border and outside.

    >>> centerness(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0, 5, 4]]))  # sqrt(1/4 * 2/2)
    tensor([0.5000])
    """
    before, after = points - objects[..., :2], objects[..., 2:] - points
    near, far = torch.minimum(before, after).clamp(min=0), torch.maximum(before, after)
    # An object without extent has near = far = 0; dividing by 1 gives it centerness 0.
    return (near / far.masked_fill(far <= 0, 1)).prod(-1).sqrt()
