"""The fits: the conditions of an optimum, known maps, and data without one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketrank.errors import CannotCalibrateError
from bucketrank.evaluation.calibration import ScoreMap
from bucketrank.evaluation.calibration.mapping import fit_platt, fit_softmax, logit, require_both, sigmoid, smoothed


def drawn(a: float, b: float, *, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits around -3, and outcomes that are right with probability sigmoid(a * logit + b)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-3, 0.5, count)
    return logits, (rng.random(count) < sigmoid(a * logits + b)).astype(float)


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (4.0, 11.0), (0.5, 3.0), (8.0, 20.0)])
def test_the_map_behind_the_data_is_found(a: float, b: float) -> None:
    fitted = fit_platt(*drawn(a, b, count=200_000))
    assert fitted == pytest.approx((a, b), rel=0.05, abs=0.05)


@given(st.floats(0.2, 6), st.floats(-3, 15), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_the_gradient_vanishes_at_the_fit(a: float, b: float, seed: int) -> None:
    logits, right = drawn(a, b, count=500, seed=seed)
    if not 20 < right.sum() < 480 or np.corrcoef(logits, right)[0, 1] < 0.05:
        return
    slope, shift = fit_platt(logits, right)
    residuals = sigmoid(slope * logits + shift) - smoothed(right)
    assert residuals.mean() == pytest.approx(0, abs=1e-6)
    assert (residuals * logits).mean() == pytest.approx(0, abs=1e-5)


def test_separated_scores_have_a_finite_fit() -> None:
    logits = np.concatenate([np.linspace(-5, -3, 50), np.linspace(-2, -1, 50)])
    a, b = fit_platt(logits, (logits > -2.5).astype(float))
    assert 1 < a < 100
    assert sigmoid(np.array([a * -1.0 + b]))[0] > 0.95


def test_iou_targets() -> None:
    logits = np.repeat([-4.0, -2.0], 500)
    a, b = fit_platt(logits, np.repeat([0.2, 0.7], 500))
    assert sigmoid(a * np.array([-4.0, -2.0]) + b) == pytest.approx([0.2, 0.7], abs=0.01)


def test_falling_scores_and_equal_scores_are_refused() -> None:
    logits, right = drawn(3.0, 9.0, count=2000)
    with pytest.raises(CannotCalibrateError, match="right more often the higher"):
        fit_platt(-logits, right)
    with pytest.raises(CannotCalibrateError, match="different scores"):
        fit_platt(np.full(50, -3.0), right[:50])


@pytest.mark.parametrize(("right", "wrong"), [(0, 100), (100, 0), (9, 100), (100, 9), (0, 0)])
def test_too_few_are_refused(right: int, wrong: int) -> None:
    with pytest.raises(CannotCalibrateError, match=f"got {right} and {wrong}; train"):
        require_both(np.array([True] * right + [False] * wrong))
    require_both(np.array([True] * 10 + [False] * 10))


def test_softmax_with_one_class_is_the_platt_fit() -> None:
    # Two logits: their difference is the log-odds, so that a and b of both fits are the same.
    logits, right = drawn(2.0, 5.0, count=5000)
    rows = np.stack([logits, np.zeros_like(logits)], 1)
    both = fit_softmax(rows, np.zeros(len(rows), dtype=np.int64), right, background=1)
    assert both == pytest.approx(fit_platt(logits, right), rel=1e-4)


def test_logit_and_sigmoid_are_inverse_and_finite() -> None:
    scores = np.array([1e-12, 0.01, 0.5, 0.999])
    assert sigmoid(logit(scores)) == pytest.approx(scores)
    assert np.isfinite(logit(np.array([0.0, 1.0]))).all()
    assert sigmoid(np.array([-1e4, 1e4])).tolist() == [0, 1]


def test_a_map_keeps_the_order_and_refuses_others() -> None:
    score_map = ScoreMap((2.0, 0.5), (1.0, -1.0))
    scores = np.linspace(0.01, 0.99, 50)
    for column in (0, 1):
        assert (np.diff(score_map(scores, np.full(50, column))) > 0).all()
    assert score_map.threshold(0.5) == pytest.approx(sigmoid(np.array([-1.0]))[0]), "the lowest of the classes"
    assert ScoreMap((2.0,), (1.0,)).threshold(0.0) == 0
    for pairs in [((0.0,), (1.0,)), ((1.0, 1.0), (1.0,)), ((float("nan"),), (0.0,)), ((), ())]:
        with pytest.raises(ValueError, match="finite pairs"):
            ScoreMap(*pairs)
