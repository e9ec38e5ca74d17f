"""Logits and deltas near the ends of the floats' range: the numbers of the definition for every method and backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bucketrank import APLoss, DRLoss, alrp_loss, ap_loss, dr_loss, quality_focal_loss, rank_sort_loss
from bucketrank.losses import kernels

from .cases import EVERY, LOSSES, RANKING, Way, answer, assert_same, identify, pairs

every_exact_way = pytest.mark.parametrize(("name", "way"), pairs(RANKING, skip=("bucketed",)), ids=identify)

TARGETS = torch.tensor([0.9, 0.3, 0.5, 0.0, 0.0, 0.0, 0.7, 0.0])
# Positives, negatives, ties and both signs.
PLAIN = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 0.5, -0.5], dtype=torch.float64)
ABOVE_0 = torch.tensor([1.0, 1.0, 0.5, 1.0, 0.25, 0.0, 0.5, 0.375], dtype=torch.float64)
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}
DELTAS = (0, 5e-324, 1e-310, 1e-46, 0.5, 1e38, 3e38, 1e300, 4e307, 8.9e307, 9e307, 1.7e308)


@pytest.mark.sampled(7)
@every_exact_way
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("shape", [PLAIN, ABOVE_0], ids=["both signs", "one sign"])
def test_logits_as_large_as_the_dtype_holds(shape: torch.Tensor, dtype: torch.dtype, name: str, way: Way) -> None:
    logits = (shape * LARGEST[dtype]).to(dtype)
    for delta in DELTAS:
        got = answer(LOSSES[name].compute, logits, TARGETS.to(dtype), delta=delta, way=way)
        # The loss depends only on the ratio of logits and delta, and a power of 2 scales them without rounding.
        factor = 1 / 16 if delta > 1 else 1.0
        expected = LOSSES[name].oracle(logits.double() * factor, TARGETS.to(dtype), delta * factor)
        assert_same(got, expected, relative=1e-5)


@pytest.mark.sampled(7)
@every_exact_way
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-310, 1e-40, 1.0])
def test_small_logits(scale: float, dtype: torch.dtype, name: str, way: Way) -> None:
    logits = (PLAIN * scale).to(dtype)
    for delta in DELTAS:
        got = answer(LOSSES[name].compute, logits, TARGETS.to(dtype), delta=delta, way=way)
        factor = 1 / 16 if delta > 1 else 2.0**60
        expected = LOSSES[name].oracle(logits.double() * factor, TARGETS.to(dtype), delta * factor)
        assert_same(got, expected, relative=1e-5)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", EVERY, ids="-".join)
@pytest.mark.parametrize("delta", DELTAS)
def test_every_method_stays_finite(delta: float, way: Way) -> None:
    for dtype, largest in LARGEST.items():
        for scale in (largest, 1.0, 1e-40):
            logits = (PLAIN * scale).to(dtype)
            got = answer(rank_sort_loss, logits, TARGETS.to(dtype), delta=delta, way=way)
            assert all(part.isfinite().all() for part in got.values + got.gradients), (dtype, scale)


@pytest.mark.parametrize("way", EVERY, ids="-".join)
def test_a_far_negative_does_not_overflow(way: Way) -> None:
    """Only the positives decide whether the edges have enough digits."""
    logits = torch.tensor([-1.0, 2.0, LARGEST[torch.float64], -LARGEST[torch.float64]], dtype=torch.float64)
    targets = torch.tensor([0.5, 0.7, 0.0, 0.0], dtype=torch.float64)
    for delta in (0.0, 0.5, 1.0):
        got = answer(rank_sort_loss, logits, targets, delta=delta, way=way)
        assert_same(got, LOSSES["rank_sort"].oracle(logits.clamp(-100, 100), targets, delta))


def test_windows_stay_inside_the_positives() -> None:
    """No window reaches past the last positive, even where a distance is infinite or NaN."""
    for scores in ([-1.7e308, 0.0, 1.7e308], [1.0, 2.0, 3.0], [np.nan] * 3):
        for delta in (0.5, 8.9e307, 1.7e308, 1e-310):
            low, high = np.full((2, 3), -1)
            kernels.windows(np.array(scores), delta, np.empty(3), low, high)
            assert ((low >= 0) & (low <= 3) & (high >= 0) & (high <= 3)).all()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda wrong: ap_loss(PLAIN, PLAIN, delta=wrong),
            "ap_loss: expected delta to be a finite number of at least 0",
        ),
        (
            lambda wrong: rank_sort_loss(PLAIN, PLAIN, delta=wrong),
            "rank_sort_loss: expected delta to be a finite number",
        ),
        (lambda wrong: alrp_loss(PLAIN, PLAIN, PLAIN, delta=wrong), "alrp_loss: expected delta to be a finite number"),
        (lambda wrong: APLoss(delta=wrong), "APLoss: expected delta to be a finite number of at least 0"),
        (lambda wrong: dr_loss(PLAIN, PLAIN, margin=-wrong), "dr_loss: expected margin to be a finite number"),
        (lambda wrong: DRLoss(smoothing=wrong), "DRLoss: expected smoothing to be a finite number above 0"),
        (
            lambda wrong: quality_focal_loss(PLAIN, PLAIN, beta=wrong),
            "quality_focal_loss: expected beta to be a finite",
        ),
    ],
)
def test_an_integer_beyond_the_floats_is_named(call: Callable[[Any], object], expected: str) -> None:
    for exponent, bits in ((400, 1329), (5000, 16610)):  # Python prints no integer of 5001 digits
        with pytest.raises(ValueError, match=f"{expected}.*, got an integer of {bits} bits"):
            call(10**exponent)
