"""Box deltas: the encoding of a box relative to its anchor or proposal that R-CNN, RetinaNet and ATSS regress."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder as TorchvisionBoxCoder


class BoxCoder(TorchvisionBoxCoder):
    """torchvision's coder, with half the operations and no host-to-device copies.

    As published, a side shrinks to 1/62.5 at most, just as it grows to 62.5 times its size at most. torchvision limits
    growth only; all other results are torchvision's.

    The delta weights (x, y, width, height) must be the same for x and y, and for width and height.

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
        """Encode boxes (n, 4) as deltas (n, 4) relative to ``proposals`` (n, 4)."""
        sizes, _, middles = _sides(proposals)
        other_sizes, _, other_middles = _sides(reference_boxes)
        shifts = self.shift_weight * (other_middles - middles) / sizes
        return torch.cat([shifts, self.size_weight * (other_sizes / sizes).log()], 1)

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        """Decode the deltas ``rel_codes`` (n, 4) relative to ``boxes`` (n, 4) to boxes (n, 4)."""
        sizes, half_sizes, middles = _sides(boxes.to(rel_codes.dtype))
        shifts = rel_codes[:, :2] / self.shift_weight
        stretches = (rel_codes[:, 2:] / self.size_weight).clamp(-self.bbox_xform_clip, self.bbox_xform_clip)
        moved = shifts * sizes + middles
        half = stretches.exp() * half_sizes
        return torch.cat([moved - half, moved + half], 1)


def _sides(boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return box sizes, half sizes and centres, each (n, 2)."""
    corner = boxes[:, :2]
    sizes = boxes[:, 2:] - corner
    half = 0.5 * sizes
    return sizes, half, corner + half
