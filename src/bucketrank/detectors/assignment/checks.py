"""The constants NEGATIVE and IGNORED, and argument checks shared by the assigners."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NEGATIVE, IGNORED = -1, -2  # same values as in torchvision's Matcher


def without_objects(anchors: Tensor, valid: Tensor | None) -> Tensor:
    """Build the assignment of an image without objects: valid anchors are negative, the others ignored."""
    assignment = torch.full(anchors.shape[:1], NEGATIVE, device=anchors.device)
    return assignment if valid is None else assignment.masked_fill_(~valid, IGNORED)


def check_boxes(name: str, **arguments: Tensor) -> None:
    """Raise unless each argument is a float tensor (n, 4)."""
    for argument, boxes in arguments.items():
        if not isinstance(boxes, Tensor) or not boxes.is_floating_point():
            got = boxes.dtype if isinstance(boxes, Tensor) else type(boxes).__name__
            raise TypeError(f"{name}: expected {argument} to be a tensor of floats, got {got}")
        if boxes.dim() != 2 or boxes.shape[1] != 4:
            raise ValueError(f"{name}: expected {argument} of shape (n, 4), got {tuple(boxes.shape)}")


def check_valid(name: str, valid: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise unless ``valid`` is None or a bool tensor of this shape, one value for each anchor."""
    if valid is None:
        return
    if valid.dtype != torch.bool:
        raise TypeError(f"{name}: expected valid of dtype torch.bool, got {valid.dtype}")
    if valid.shape != shape:
        raise ValueError(f"{name}: expected valid of shape {shape}, one for each anchor, got {tuple(valid.shape)}")


def check_levels(name: str, per_level: Sequence[int], count: int, topk: int) -> None:
    """Raise unless ``per_level`` adds up to ``count`` anchors and ``topk`` is at least 1."""
    if sum(per_level) != count or any(number < 0 for number in per_level):
        raise ValueError(
            f"{name}: expected per_level to add up to the {count} anchors, got {list(per_level)} = {sum(per_level)}"
        )
    if topk < 1:
        raise ValueError(f"{name}: expected topk of at least 1, got {topk!r}")
