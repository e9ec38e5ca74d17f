"""Geometry of boxes: IoU, GIoU loss, centre, and centerness of a point."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder as TorchvisionBoxCoder

TINY = 1e-7  # added to the areas by which the GIoU loss divides


def paired_iou(boxes: Tensor, objects: Tensor, *, smallest_union: float = 1e-6) -> Tensor:
    """Return the IoU of each box with the object at the same index; torchvision's ``box_iou`` compares all pairs.

    Both are (..., 4) and broadcast: ``paired_iou(boxes, objects[:, None])`` compares all pairs. The union is clamped to
    at least ``smallest_union``, so that two boxes without area have IoU 0. Choose a smaller one for boxes in units of
    the image.

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


def giou_loss(boxes: Tensor, objects: Tensor) -> Tensor:
    """Return the GIoU loss (P,) of each box (P, 4) with the object of the same row (Rezatofighi et al., CVPR 2019).

    The values and gradients are those of torchvision's ``generalized_box_iou_loss``, whose boolean masks make the host
    wait for a GPU.

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
    """Return the centre (x, y) of each box: (..., 4) to (..., 2)."""
    return (boxes[..., :2] + boxes[..., 2:]) / 2


def centerness(points: Tensor, objects: Tensor) -> Tensor:
    """Return the centerness of each point (P, 2) in the object (P, 4) of the same row (Tian et al., 2019, Eq. 3).

    With l, r, t and b the distances to the four sides: ``sqrt(min(l, r) / max(l, r) * min(t, b) / max(t, b))``.
    It is 1 at the centre, and 0 on the border and outside.

    >>> centerness(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0, 5, 4]]))  # sqrt(1/4 * 2/2)
    tensor([0.5000])
    """
    before, after = points - objects[..., :2], objects[..., 2:] - points
    least, most = torch.minimum(before, after).clamp(min=0), torch.maximum(before, after)
    # An object without extent has least = most = 0; dividing by 1 gives it centerness 0.
    return (least / most.masked_fill(most <= 0, 1)).prod(-1).sqrt()


# Box deltas: a box relative to another box, as R-CNN, RetinaNet and ATSS regress it.


class BoxCoder(TorchvisionBoxCoder):
    """torchvision's coder, in half the operations and without copies from the host to a GPU.

    The results are torchvision's with one exception: as published, a side shrinks to 1/62.5 of the other box at most,
    just as it grows to at most 62.5 times its size. torchvision limits growth only.

    The weights (x, y, width, height) of the deltas must be the same for x and y, and for width and height.

    >>> coder = BoxCoder(weights=(10.0, 10.0, 5.0, 5.0))
    >>> anchors, objects = torch.tensor([[0.0, 0, 4, 4]]), torch.tensor([[2.0, 0, 6, 4]])
    >>> coder.encode_single(objects, anchors)  # moved by half a width, times 10
    tensor([[5., 0., 0., 0.]])
    >>> coder.decode_single(coder.encode_single(objects, anchors), anchors)
    tensor([[2., 0., 6., 4.]])
    """

    def __init__(self, weights: tuple[float, float, float, float]) -> None:
        super().__init__(weights)
        x, y, width, height = weights
        if x != y or width != height:
            raise ValueError(
                f"BoxCoder: expected equal weights for x and y, and for width and height, got {weights!r}; "
                "use torchvision's BoxCoder"
            )
        self.shift_weight, self.size_weight = x, width

    def encode_single(self, reference_boxes: Tensor, proposals: Tensor) -> Tensor:
        """Return the deltas (n, 4) of the boxes (n, 4) relative to ``proposals`` (n, 4)."""
        sizes, middles = _size_and_middle(proposals)
        other_sizes, other_middles = _size_and_middle(reference_boxes)
        shifts = self.shift_weight * (other_middles - middles) / sizes
        return torch.cat([shifts, self.size_weight * (other_sizes / sizes).log()], 1)

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        """Return the boxes (n, 4) that have the deltas ``rel_codes`` (n, 4) relative to ``boxes`` (n, 4)."""
        sizes, middles = _size_and_middle(boxes.to(rel_codes.dtype))
        shifts = rel_codes[:, :2] / self.shift_weight
        stretches = (rel_codes[:, 2:] / self.size_weight).clamp(-self.bbox_xform_clip, self.bbox_xform_clip)
        moved = shifts * sizes + middles
        half = 0.5 * (stretches.exp() * sizes)
        return torch.cat([moved - half, moved + half], 1)


def _size_and_middle(boxes: Tensor) -> tuple[Tensor, Tensor]:
    corner = boxes[:, :2]
    sizes = boxes[:, 2:] - corner
    return sizes, corner + 0.5 * sizes
