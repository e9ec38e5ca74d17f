"""Boxes decoded from box deltas alone, in units of the anchor."""

from __future__ import annotations

from torch import Tensor
from torchvision.models.detection._utils import BoxCoder


def relative_boxes(coder: BoxCoder, deltas: Tensor) -> Tensor:
    """Decode box deltas (P, 4) against the unit box: each box comes in units of its own anchor.

    IoU and GIoU do not change when both boxes are shifted and scaled together. A prediction and its target that are
    encoded against the same anchor can therefore be compared without the anchor.
    """
    deltas = deltas.float()
    boxes: Tensor = coder.decode_single(deltas, deltas.new_tensor([0, 0, 1, 1]).expand(len(deltas), 4))
    return boxes
