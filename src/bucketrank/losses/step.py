"""The smoothed step H, which compares two logits by their difference (paper, Eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor

# Lifts the smallest numbers of float32 and float64 to normal ones. Large differences may overflow: H is 0 or 1.
MAGNIFICATION = 2.0**100


def step_(x: Tensor, delta: float) -> Tensor:
    """Overwrite ``x`` with H(x): 0 below -delta, 1 above delta, a linear ramp between; at delta 0, [x >= 0]."""
    if delta == 0:
        return x.ge_(0)
    width, tiny = 2 * delta, torch.finfo(x.dtype).tiny
    if width < tiny:  # has few digits in this dtype, or none: a tie would be 0 / 0
        x, width = x.mul_(MAGNIFICATION), max(width * MAGNIFICATION, tiny)
    return x.div_(width).add_(0.5).clamp_(0, 1)


def step_at_tie(delta: float) -> float:
    """Return H(0), with which an entry counts itself."""
    return 1.0 if delta == 0 else 0.5
