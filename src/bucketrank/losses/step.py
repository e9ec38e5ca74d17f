"""The smoothed step H that turns a difference of logits into a comparison (paper, Eq. 2)."""

from __future__ import annotations

from torch import Tensor


def step_(x: Tensor, delta: float) -> Tensor:
    """H(x): 0 below -delta, 1 above delta, a straight ramp between; overwrites ``x``. At delta 0, H(x) = [x >= 0]."""
    if delta == 0:
        return x.ge_(0)
    return x.div_(2 * delta).add_(0.5).clamp_(0, 1)


def step_at_tie(delta: float) -> float:
    """H(0): what an entry counts for itself."""
    return 1.0 if delta == 0 else 0.5
