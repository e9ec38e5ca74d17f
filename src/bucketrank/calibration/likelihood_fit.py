"""Fits of calibration: the pair (a, b) of highest likelihood, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bucketrank.calibration.score_head import CannotCalibrateError

Values = NDArray[np.float64]

LEAST_COUNT = 10  # detections that are right, and that are wrong, which a fit needs
LEAST_SLOPE = 1e-3  # below it, scores say nothing about right and wrong
STEPS = 200


def require_both(right: NDArray[np.bool_]) -> None:
    """Raise CannotCalibrateError unless enough detections are right and enough are wrong."""
    count = int(right.sum())
    wrong = len(right) - count
    if min(count, wrong) < LEAST_COUNT:
        raise CannotCalibrateError(
            f"calibrate: expected at least {LEAST_COUNT} detections that are right and {LEAST_COUNT} that are wrong, "
            f"got {count} and {wrong}; train for longer, or give more images"
        )


def smoothed(targets: Values) -> Values:
    """Return targets moved inward, so that the fit stays finite where scores separate right and wrong (Platt, 1999).

    With p right and n wrong ones, 1 becomes (p + 1) / (p + 2) and 0 becomes 1 / (n + 2).
    """
    right = targets.sum()
    high, low = float((right + 1) / (right + 2)), float(1 / (len(targets) - right + 2))
    moved: Values = low + targets * (high - low)
    return moved


def fit_platt(logits: Values, targets: Values) -> tuple[float, float]:
    """Return a and b of the most likely ``sigmoid(a * logit + b)``, a above 0; ``targets`` are from 0 to 1.

    CannotCalibrateError if higher scores are not right more often.

    >>> a, b = fit_platt(np.array([-3.0, -2, -1] * 50), np.array([0.0, 0, 1] * 25 + [0.0, 1, 1] * 25))
    >>> a > 0 and b > 0
    True
    """
    mean, spread = float(logits.mean()), float(logits.std())
    if spread == 0:
        raise CannotCalibrateError("calibrate: expected detections with different scores, got equal ones")
    scaled = torch.from_numpy((logits - mean) / spread)
    labels = torch.from_numpy(smoothed(targets))

    def loss(log_slope: Tensor, shift: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(log_slope.exp() * scaled + shift, labels)

    slope, shift = _minimised(loss)
    return slope / spread, shift - slope * mean / spread


def fit_softmax(logits: Values, columns: NDArray[np.int64], targets: Values, *, background: int) -> tuple[float, float]:
    """Return a and b: the softmax of ``a * logits``, with ``b`` subtracted from the background, is most likely.

    ``logits`` is (n, C + 1) and ``columns`` (n,) the class of each detection. The temperature is 1 / a.
    """
    rows, labels = torch.from_numpy(logits), torch.from_numpy(smoothed(targets))
    own = torch.from_numpy(columns)[:, None]
    is_own = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, own, 1)
    is_background = torch.zeros(rows.shape[1], dtype=rows.dtype)
    is_background[background] = 1

    def loss(log_slope: Tensor, shift: Tensor) -> Tensor:
        moved = log_slope.exp() * rows - shift * is_background
        others = moved.masked_fill(is_own, -torch.inf).logsumexp(1)
        return F.binary_cross_entropy_with_logits(moved.gather(1, own)[:, 0] - others, labels)

    return _minimised(loss)


def _minimised(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float]:
    """Minimise over the logarithm of a and over b, from a = 1 and b = 0, and return a and b."""
    with torch.enable_grad():
        values = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS(
            [values], max_iter=STEPS, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )

        def evaluate() -> Tensor:
            optimiser.zero_grad()
            value = loss(values[0], values[1])
            value.backward()
            return value

        optimiser.step(evaluate)
    log_slope, shift = values.tolist()
    slope = float(np.exp(log_slope))
    if not np.isfinite([slope, shift]).all() or slope < LEAST_SLOPE:
        raise CannotCalibrateError(
            "calibrate: expected detections that are right more often the higher their score is; these are not, so "
            "that no rising map fits; train for longer"
        )
    return slope, shift
