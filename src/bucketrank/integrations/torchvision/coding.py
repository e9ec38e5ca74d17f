"""Boxes from their codes alone."""

from __future__ import annotations

from torch import Tensor
from torchvision.models.detection._utils import BoxCoder


def relative_boxes(coder: BoxCoder, codes: Tensor) -> Tensor:
    """The boxes that ``codes`` (P, 4) describe, each in units of its own anchor.

    IoU and GIoU of two boxes do not change when both are moved and stretched alike, so a pair coded against the same
    anchor can be compared without that anchor.
    """
    codes = codes.float()
    boxes: Tensor = coder.decode_single(codes, codes.new_tensor([0, 0, 1, 1]).expand(len(codes), 4))
    return boxes
