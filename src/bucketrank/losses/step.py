"""The smoothed step H, which compares two logits by their difference (paper, Eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor


def step_(x: Tensor, delta: float) -> Tensor:
    """Overwrite ``x`` with H(x): 0 below -delta, 1 above delta, a linear ramp between; at delta 0, [x >= 0]."""
    if delta == 0:
        return x.ge_(0)
    # A width that rounds to 0 in this dtype would make a tie 0 / 0.
    return x.div_(max(2 * delta, torch.finfo(x.dtype).tiny)).add_(0.5).clamp_(0, 1)


def step_at_tie(delta: float) -> float:
    """Return H(0), with which an entry counts itself."""
    return 1.0 if delta == 0 else 0.5
