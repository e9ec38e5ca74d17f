"""The paper's bucketing: its formulas with prototypes, and Theorem 1."""

from __future__ import annotations

import pytest
import torch

from . import oracle
from .cases import DELTAS, LOSSES, answer, assert_same, hard_inputs, pairs, synthetic

WAY = ("bucketed", "torch")
HARD = hard_inputs()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("case", HARD)
def test_equals_the_formulas_with_prototypes(case: str, delta: float) -> None:
    logits, targets = HARD[case]
    for dtype, relative in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
        got = answer(LOSSES["rank_sort"].compute, logits.to(dtype), targets.to(dtype), delta=delta, way=WAY)
        assert_same(got, oracle.bucketed_rank_sort(logits, targets, delta), relative=relative)


@pytest.mark.parametrize("name", [name for name, way in pairs() if way == WAY])
def test_theorem_1_at_delta_0_it_equals_the_definition(name: str) -> None:
    logits, targets = synthetic(3_000, 200)
    assert logits.unique().numel() == logits.numel()
    loss = LOSSES[name]
    got = answer(loss.compute, logits.double(), targets.double(), delta=0.0, way=WAY)
    assert_same(got, loss.oracle(logits, targets, 0.0), relative=1e-9)


def test_at_larger_delta_it_is_an_approximation() -> None:
    logits, targets = synthetic(3_000, 30)
    got = answer(LOSSES["ap"].compute, logits, targets, delta=0.5, way=WAY)
    expected = oracle.ap(logits, targets, 0.5)
    negatives = targets == 0
    error = (got.gradients[0] - expected.gradients[0])[negatives].abs().max() / expected.gradients[0][negatives].max()
    assert 1e-3 < error < 0.1


def test_hand_worked() -> None:
    # Sorted: 4- 3- | 2+ | 1- 0- | -1+. Prototypes 3.5 (of 2) and 0.5 (of 2); delta 1, so H(x) = x / 2 + 1/2 within 1.
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    targets = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 0.5], dtype=torch.float64)
    got = answer(LOSSES["ap"].compute, logits, targets, delta=1.0, way=WAY)
    # Positive 2: both above in full, 0.5 is more than 1 below: 2 / (0.5 + 2). Positive -1: all four: 4 / (0.5 + 1 + 4).
    high, low = 2 / 2.5, 4 / 5.5
    upper, lower = (1 / 2.5 + 1 / 5.5) / 2, 1 / 5.5 / 2
    torch.testing.assert_close(got.values[0].item(), (high + low) / 2)
    torch.testing.assert_close(got.gradients[0].tolist(), [upper, upper, -high / 2, lower, lower, -low / 2])
