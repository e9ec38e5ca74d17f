"""Every loss in Triton kernels against the definition in float64: the cases of the other backends."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from .. import oracle
from ..cases import DELTAS, LOSSES, RANKING, answer, assert_same, hard_inputs, localisation_errors, synthetic
from .harness import compute

HARD = hard_inputs()

pytestmark = pytest.mark.usefixtures("device")

every_loss = pytest.mark.parametrize("name", RANKING)

# Every loss with every delta and dtype. The daily loop takes a few: RS and aLRP contain the comparisons of the others.
DAILY = {
    ("rank_sort", 0.0, torch.float32),
    ("rank_sort", 0.5, torch.float32),
    ("rank_sort", 0.5, torch.float64),
    ("alrp", 0.1, torch.float32),
}
COMBINATIONS = [
    pytest.param(name, delta, dtype, marks=[] if (name, delta, dtype) in DAILY else pytest.mark.slow)
    for name in RANKING
    for delta in DELTAS
    for dtype in (torch.float32, torch.float64)
]


@cache
def _hard_in_one() -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """All hard inputs as the rankings of one call."""
    logits, targets = (torch.cat(parts) for parts in zip(*HARD.values(), strict=True))
    return logits, targets, tuple(len(logits) for logits, _ in HARD.values())


@pytest.mark.parametrize(("name", "delta", "dtype"), COMBINATIONS)
def test_equals_the_definition(name: str, delta: float, dtype: torch.dtype) -> None:
    logits, targets, sizes = _hard_in_one()
    got = compute(name, logits.to(dtype), targets.to(dtype), delta, sizes=sizes)
    for ranking, (case_logits, case_targets) in enumerate(HARD.values()):
        expected = LOSSES[name].oracle(case_logits, case_targets, delta)
        assert_same(got.answer(ranking, sizes), expected, relative=1e-6 if dtype is torch.float32 else 1e-9)


@every_loss
@pytest.mark.parametrize("case", ["plain", "ties and equal labels", "one positive alone"])
def test_a_single_ranking_equals_the_definition(case: str, name: str) -> None:
    for delta in (0.0, 0.5):
        got = compute(name, *HARD[case], delta)
        assert_same(got.answer(), LOSSES[name].oracle(*HARD[case], delta))


@pytest.mark.parametrize(("positives", "delta", "name"), [(300, 0.1, "rank_sort"), (300, 5.0, "alrp"), (0, 0.5, "ap")])
def test_larger_inputs(positives: int, delta: float, name: str) -> None:
    logits, targets = synthetic(3_000, positives)
    expected = answer(LOSSES[name].compute, logits.double(), targets.double(), delta=delta, way=("pairwise", "torch"))
    assert_same(compute(name, logits, targets, delta).answer(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.0, 0.5])
@every_loss
def test_three_thousand_positives(name: str, delta: float) -> None:
    logits, targets = synthetic(6_000, 3_000)
    expected = answer(LOSSES[name].compute, logits.double(), targets.double(), delta=delta, way=("pairwise", "torch"))
    assert_same(compute(name, logits, targets, delta).answer(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("delta", [1e-12, 1e-40, 1e-300, 1e35])
def test_a_delta_beyond_the_digits_of_the_logits(delta: float, dtype: torch.dtype) -> None:
    # At 1e6 the edges s +- 1e-12 round to s; a tie must count as 1/2 all the same.
    logits = torch.tensor([1e6, 1e6, 1e6 + 1, 1e6 - 1, 0.0, -0.0], dtype=dtype)
    targets = torch.tensor([0.5, 0.0, 0.0, 0.9, 0.3, 0.0], dtype=dtype)
    for name in ("rank_sort", "alrp"):
        assert_same(compute(name, logits, targets, delta).answer(), LOSSES[name].oracle(logits, targets, delta))


@every_loss
@pytest.mark.parametrize("finer", [1e-3, 1e-8, 1e-12])
def test_clusters_far_apart_with_a_fine_delta(finer: float, name: str) -> None:
    noise, targets = synthetic(700, 70)
    logits = torch.arange(700, dtype=torch.float64) % 7 * (1e6 / 7) + noise.double() * 1e6 * finer
    got = compute(name, logits, targets.double(), 1e6 * finer).answer()
    assert_same(got, LOSSES[name].oracle(logits, targets, 1e6 * finer), relative=1e-5)


@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_gradient_at_the_localisation_errors(delta: float) -> None:
    for case in ("plain", "ties", "all logits equal"):
        logits, targets = HARD[case]
        errors = torch.linspace(0.1, 1.9, int((targets > 0).sum()), dtype=torch.float64)
        got = compute("alrp", logits, targets, delta, localisation=errors)
        expected, at_errors = oracle.alrp(logits, targets, errors, delta)
        assert_same(got.answer(), expected)
        torch.testing.assert_close(got.at_localisation, at_errors)


@every_loss
def test_far_apart_without_overflow(name: str) -> None:
    logits = torch.tensor([3e38, -3e38, 0.0, 3e38, -3e38, 1.0])
    targets = torch.tensor([0.4, 0.7, 0.2, 0.0, 0.0, 0.0])
    assert_same(compute(name, logits, targets, 0.5).answer(), LOSSES[name].oracle(logits, targets, 0.5))


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_broken_ranking_is_nan_and_leaves_the_others_alone(dtype: torch.dtype, name: str) -> None:
    whole = torch.tensor([0.5, -0.2, 0.1, 2.0, -3.0], dtype=dtype)
    labels = torch.tensor([0.3, 0.9, 0.0, -1.0, 0.0], dtype=dtype)
    broken = [
        (position, value, where)
        for where, position in (("logits", 1), ("logits", 4), ("targets", 0))
        for value in (math.nan, math.inf, -math.inf)
        if (where, value) != ("targets", -math.inf)
    ]
    logits, targets = whole.repeat(len(broken) + 1), labels.repeat(len(broken) + 1)
    for ranking, (position, wrong, where) in enumerate(broken):
        (logits if where == "logits" else targets)[5 * ranking + position] = wrong
    errors = torch.linspace(0.1, 0.4, 2, dtype=dtype)
    count = int((targets > 0).sum())
    got = compute(
        name,
        logits,
        targets,
        0.5,
        sizes=(5,) * (len(broken) + 1),
        localisation=errors.repeat(len(broken) + 1)[:count] if name == "alrp" else None,
    )
    for value, gradient in zip(got.values, got.gradients, strict=True):
        assert value.isnan().tolist() == [True] * len(broken) + [False]
        at_rankings = gradient.view(-1, 5)
        assert at_rankings.isnan().tolist() == [[True, True, True, False, True]] * len(broken) + [[False] * 5]
        assert at_rankings[:, 3].tolist() == [0.0] * (len(broken) + 1)
    if name != "alrp":
        expected = compute(name, whole, labels, 0.5)
        assert_same(got.answer(len(broken), (5,) * (len(broken) + 1)), expected.answer())


@every_loss
def test_without_positives_all_is_zero_unless_broken(name: str) -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, math.nan, math.nan, 4.0])
    targets = torch.tensor([0.0, 0.0, -1.0, 0.0, -1.0, 0.0])
    got = compute(name, logits, targets, 0.5, sizes=(3, 1, 2))
    for value, gradient in zip(got.values, got.gradients, strict=True):
        torch.testing.assert_close(value, torch.tensor([0.0, math.nan, 0.0]), equal_nan=True)
        assert gradient.isnan().tolist() == [False, False, False, True, False, False]
        assert gradient.nan_to_num().tolist() == [0.0] * 6


@every_loss
@pytest.mark.parametrize("sizes", [(), (0,), (0, 0, 0)])
@pytest.mark.parametrize("capacity", [None, 3])
def test_empty_input(capacity: int | None, sizes: tuple[int, ...], name: str) -> None:
    got = compute(name, torch.zeros(0), torch.zeros(0), 0.5, sizes=sizes, max_positives=capacity)
    assert [value.tolist() for value in got.values] == [[0.0] * len(sizes)] * len(got.values)
    assert [gradient.shape for gradient in got.gradients] == [(0,)] * len(got.gradients)


@every_loss
@pytest.mark.parametrize("labels", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_it_is(dtype: torch.dtype, labels: torch.dtype, name: str) -> None:
    logits, targets = synthetic(1_500, 60)
    logits, targets = logits.to(dtype), targets.to(labels)
    expected = LOSSES[name].oracle(logits.double(), targets.double(), 0.5)
    got = compute(name, logits, targets, 0.5)
    assert all(value.dtype == torch.float32 for value in got.values)
    assert all(gradient.dtype == dtype for gradient in got.gradients)
    rounded = expected._replace(gradients=[gradient.to(dtype) for gradient in expected.gradients])
    # The gradient is computed in float32 and rounded once, rarely to the other neighbour.
    assert_same(got.answer(), rounded, relative=float(torch.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_localisation(dtype: torch.dtype) -> None:
    logits, targets = HARD["plain"]
    errors = localisation_errors(targets).to(dtype)
    got = compute("alrp", logits, targets, 0.5, localisation=errors)
    expected, at_errors = oracle.alrp(logits, targets, errors.double(), 0.5)
    assert_same(got.answer(), expected)
    assert got.at_localisation is not None
    torch.testing.assert_close(got.at_localisation, at_errors.to(dtype))


@every_loss
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_slices_that_are_not_aligned(shift: int, name: str) -> None:
    logits, targets = synthetic(2_000, 60)
    for dtype in (torch.float32, torch.bfloat16):
        moved = torch.empty(2_003, dtype=dtype)[shift:][:2_000].copy_(logits)
        labels = torch.empty(2_003)[3 - shift :][:2_000].copy_(targets)
        got = compute(name, moved, labels, 0.5)
        expected = LOSSES[name].oracle(moved.double(), targets.double(), 0.5)
        assert_same(got.answer(), expected, relative=1e-6 if dtype is torch.float32 else 8e-3)


@every_loss
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.1])
def test_collapsed_logits(spread: float, name: str) -> None:
    logits, targets = synthetic(3_000, 40)
    logits = logits * spread - 4.6
    assert_same(compute(name, logits, targets, 0.5).answer(), LOSSES[name].oracle(logits, targets, 0.5))


@every_loss
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_broken_score_reads_nothing_out_of_bounds(value: float, name: str) -> None:
    logits, targets = synthetic(300, 30)
    position = int((targets > 0).nonzero()[0])
    for dtype in (torch.float32, torch.float64):
        broken = logits.to(dtype).clone()
        broken[position] = value
        got = compute(name, broken, targets.to(dtype), 0.5)
        assert all(number.isnan().all() for number in got.values)
