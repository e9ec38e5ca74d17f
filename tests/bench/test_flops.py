"""The formulas, compared with algorithms that count their operations and with counts by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bucketrank import ap_loss, rank_sort_loss
from bucketrank.bench.losses import flops
from bucketrank.bench.losses.flops import Counts
from bucketrank.bench.losses.loss_contenders import count_operations, focal_loss
from bucketrank.bench.losses.synthetic_logits import SyntheticLogits
from bucketrank.settings.choices import Method
from tests.bench import counted
from tests.bench.counted import TALLY, Real

ALGORITHMS: dict[str, Callable[..., tuple[list[Real], list[Real], list[Real]]]] = {
    "pairwise": counted.pairwise,
    "bucketed": counted.bucketed,
    "exact": counted.exact,
}


def drawn(positives: int, negatives: int, seed: int) -> SyntheticLogits:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(positives + negatives, generator=generator, dtype=torch.float64)
    labels = 0.05 + 0.9 * torch.rand(positives, generator=generator, dtype=torch.float64)
    return SyntheticLogits(logits, torch.cat([labels, torch.zeros(negatives, dtype=torch.float64)]))


def reals(values: Tensor) -> list[Real]:
    return [Real(x) for x in values.tolist()]


@pytest.mark.parametrize(("positives", "negatives"), [(1, 1), (1, 9), (2, 3), (5, 0), (5, 17), (8, 30), (13, 40)])
@pytest.mark.parametrize("method", ["pairwise", "bucketed", "exact"])
@pytest.mark.parametrize("loss", ["ap", "rs"])
def test_formula_counts_a_correct_algorithm(loss: str, method: Method, positives: int, negatives: int) -> None:
    data, delta = drawn(positives, negatives, seed=positives), 0.4
    s, u, n = (reals(x) for x in (data.logits[:positives], data.targets[:positives], data.logits[positives:]))
    if negatives:
        # One negative below the ramps of all positives.
        n[0] = Real(data.logits[:positives].min().item() - 1)
        data.logits[positives] = n[0].value
    TALLY[0] = 0
    losses, gradient, _ = ALGORITHMS[method](s, u if loss == "rs" else None, n, delta)
    assert TALLY[0] == flops.FORMULAS[loss, method](data.counts(delta))

    logits = data.logits.clone().requires_grad_()
    if loss == "ap":
        value = ap_loss(logits, data.targets, delta=delta, method=method)
    else:
        value = sum(rank_sort_loss(logits, data.targets, delta=delta, method=method), start=torch.zeros(()))
    value.backward()
    assert logits.grad is not None
    torch.testing.assert_close(torch.tensor(sum(x.value for x in losses), dtype=value.dtype), value.detach())
    torch.testing.assert_close(
        torch.tensor([g.value for g in gradient], dtype=torch.float64), logits.grad[:positives], rtol=1e-6, atol=1e-9
    )


def test_one_positive_and_one_negative_by_hand() -> None:
    counts = Counts(positives=1, negatives=1, relevant=1, buckets=1)
    relevance = 1 + 1  # go delta below the positive, compare the negative with that
    comparisons = 5 + 5  # H with itself and with the negative
    sums = 1 + 1
    terms = 5  # rank, l_R, 1 / rank, - l_R, sum of the loss
    gradient = 2  # weight times H, added to the negative
    division = 1 + 1 + 1  # loss, positive, negative
    assert flops.pairwise_ap(counts) == relevance + comparisons + sums + terms + gradient + division


@pytest.mark.parametrize(("n", "comparisons"), [(0, 0), (1, 0), (2, 2), (3, 6), (8, 24), (9, 36)])
def test_sort_is_n_log_n(n: int, comparisons: int) -> None:
    assert flops.sort(n) == comparisons


@pytest.mark.parametrize("n", range(1, 20))
def test_search_is_log_n(n: int) -> None:
    assert flops.search(n) == math.ceil(math.log2(n + 1))


def test_focal_and_cross_entropy_count_correct_formulas() -> None:
    logits = torch.tensor([-1.5, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    TALLY[0] = 0
    pairs = [counted.focal(Real(x), t) for x, t in zip(logits.tolist(), targets.tolist(), strict=True)]
    assert TALLY[0] == flops.focal(3)
    value = focal_loss(logits, targets)
    value.backward()
    torch.testing.assert_close(torch.tensor(sum(x.value for x, _ in pairs), dtype=torch.float64), value.detach())
    torch.testing.assert_close(torch.tensor([g.value for _, g in pairs], dtype=torch.float64), logits.grad)

    TALLY[0] = 0
    mean = (
        counted.total(
            [counted.cross_entropy(Real(x), t) for x, t in zip(logits.tolist(), targets.tolist(), strict=True)]
        )
        / 3
    )
    weight = Real(1) / 3
    for x, t in zip(logits.tolist(), targets.tolist(), strict=True):
        (counted.sigmoid(Real(x)) - t) * weight
    assert TALLY[0] == flops.cross_entropy(3)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits.detach(), targets)
    torch.testing.assert_close(torch.tensor(mean.value, dtype=torch.float64), expected)


def test_baselines_count_every_logit() -> None:
    counts = Counts(positives=2, negatives=6, relevant=5, buckets=3)
    assert count_operations("focal", None, counts) == flops.focal(8)
    assert count_operations("bce", None, counts) == flops.cross_entropy(8)
    assert count_operations("sort", None, counts) == 24
    assert (
        count_operations("exact-torch", "rs", counts)
        == count_operations("exact-fused", "rs", counts)
        == flops.exact_rs(counts)
    )
