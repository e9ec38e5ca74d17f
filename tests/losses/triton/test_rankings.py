"""Many rankings in one call, a capacity, and the same bits in every interleaving of the programs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ...ptx.device import Device
from ..cases import RANKING, assert_same, localisation_errors, synthetic
from .harness import Result, compute

pytestmark = pytest.mark.usefixtures("device")
every_loss = pytest.mark.parametrize("name", RANKING)
# In the daily loop only RS, with a kernel more than the others, and aLRP, which also ranks the localisation errors.
mostly_slow = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("rank_sort", "alrp") else pytest.mark.slow) for name in RANKING]
)
SIZES = (700, 0, 1, 300, 1, 250, 0)


def _many_rankings() -> tuple[Tensor, Tensor]:
    """Rankings of all sorts: larger and smaller, empty, one entry, no positives, only positives, all ignored."""
    logits, targets = synthetic(sum(SIZES), 120)
    targets[700] = 0.5
    targets[701:731] = targets[701:731].abs() + 0.1
    targets[1001] = 0.0
    targets[1002:1100] = -1.0
    return (logits * 4).round() / 4, targets


def _same_bits(one: Result, other: Result) -> bool:
    mine, theirs = ([*result.values, *result.gradients, result.at_localisation] for result in (one, other))
    return all(a is b is None or torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))  # type: ignore[arg-type]


@mostly_slow
@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_many_rankings_equal_a_loop(delta: float, name: str) -> None:
    logits, targets = _many_rankings()
    together = compute(name, logits, targets, delta, sizes=SIZES)
    for ranking, (part, labels) in enumerate(zip(logits.split(SIZES), targets.split(SIZES), strict=True)):
        alone = compute(name, part, labels, delta)
        assert_same(together.answer(ranking, SIZES), alone.answer(), relative=1e-7)


def test_equal_sizes_equal_a_loop() -> None:
    logits, targets = synthetic(4 * 300, 100)
    together = compute("rank_sort", logits, targets, 0.5, sizes=(300,) * 4)
    for ranking, (part, labels) in enumerate(zip(logits.split(300), targets.split(300), strict=True)):
        assert_same(
            together.answer(ranking, (300,) * 4), compute("rank_sort", part, labels, 0.5).answer(), relative=1e-7
        )


@pytest.mark.sampled(4)
@mostly_slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_capacity_changes_nothing(dtype: torch.dtype, name: str) -> None:
    logits, targets = (tensor.to(dtype) for tensor in _many_rankings())
    positives = int((targets > 0).sum())
    expected = compute(name, logits, targets, 0.5, sizes=SIZES)
    for capacity in (positives, positives + 77):
        errors = None
        if name == "alrp":
            errors = torch.cat([localisation_errors(targets), torch.zeros(capacity - positives)]).to(dtype)
        got = compute(name, logits, targets, 0.5, sizes=SIZES, max_positives=capacity, localisation=errors)
        if errors is not None:
            assert got.at_localisation is not None
            assert not got.at_localisation[positives:].any()
            got = got._replace(at_localisation=got.at_localisation[:positives])
        # The number of copies of the buckets differs; their sums are integers.
        assert _same_bits(got, expected)


@every_loss
def test_more_positives_than_the_capacity_give_nan(name: str) -> None:
    targets = torch.tensor([0.5, 0.0, -1.0, 0.7, 0.0, 0.9, 0.0])
    logits = torch.linspace(-1, 1, 7)
    errors = torch.full((2,), 0.3) if name == "alrp" else None
    # The third positive does not fit.
    got = compute(name, logits, targets, 0.5, sizes=(5, 2), max_positives=2, localisation=errors)
    for value, gradient in zip(got.values, got.gradients, strict=True):
        assert value.isnan().all()
        assert gradient.isnan().tolist() == [True, True, False, True, True, True, True]
    if name == "alrp":
        errors = torch.full((3,), 0.3)  # one for each positive, of which the kernels see two
        got = compute(name, logits, targets, 0.5, sizes=(5, 2), max_positives=2, localisation=errors)
        assert got.at_localisation is not None
        assert got.at_localisation.isnan().all()
    none = compute(name, logits, targets, 0.5, max_positives=0, localisation=errors)
    assert all(value.isnan().all() for value in none.values)


@mostly_slow
@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_the_same_bits_in_five_interleavings(device: Device, delta: float, name: str) -> None:
    logits, targets = synthetic(5_000, 150)
    sizes = (3_000, 2_000)
    expected = compute(name, logits, targets, delta, sizes=sizes)
    for seed in range(2, 6):
        device.seed = seed
        assert _same_bits(compute(name, logits, targets, delta, sizes=sizes), expected)
