"""The formulas of operations, compared with counts by hand on two small cases."""

from __future__ import annotations

import math

import pytest

from benchmarks.losses import flops
from benchmarks.losses.contenders import LOSSES, METHODS, count_operations
from benchmarks.losses.flops import FORMULAS, Counts

ONE = Counts(positives=1, negatives=1, relevant=1, buckets=1)
# One of three negatives is below all ramps; the other two are in buckets of their own.
TWO = Counts(positives=2, negatives=3, relevant=2, buckets=2)

# Parts of the case TWO. H of a difference takes 5 operations: subtract, scale, shift, max, min.
RELEVANT = 1 + 1 + 3  # the lower positive, delta below it, a comparison for each negative
RANKS = 4 * 5 + 4  # H of four pairs of positives, summed
TERMS = 2 * 5 + (1 + 2)  # rank, l_R, 1 / rank, sign, sum for each positive; division of loss and gradients by P
SORTING = 2 * 7 + (1 + 2)  # l_S, l_S*, e, test of D, e / D, gradient, sum for each positive; division by P
SORTING_PAIRS = 2 + 4 * (2 + 1 + 3 + 2)  # 1 - u; products and sums, comparison of labels, restricted sums, H e / D


@pytest.mark.parametrize(
    ("loss", "method", "expected"),
    [
        # H of four pairs with a negative, summed, weighted and added to its gradient; division by P.
        ("ap", "pairwise", RELEVANT + RANKS + TERMS + 4 * (5 + 1 + 2) + 2),
        ("rs", "pairwise", RELEVANT + RANKS + TERMS + 4 * (5 + 1 + 2) + 2 + SORTING_PAIRS + SORTING),
        # Five logits are sorted with 3 comparisons each. Two buckets have a mean. Sums are weighted by bucket size.
        ("ap", "bucketed", 5 * 3 + RELEVANT + (2 + 2) + RANKS + TERMS + 4 * (5 + 2 + 2) + 2),
        ("rs", "bucketed", 5 * 3 + RELEVANT + (2 + 2) + RANKS + TERMS + 4 * (5 + 2 + 2) + 2 + SORTING_PAIRS + SORTING),
    ],
)
def test_two_positives_by_hand(loss: str, method: str, expected: int) -> None:
    assert FORMULAS[loss, method](TWO) == expected


def test_exact_bucketing_of_two_positives_by_hand() -> None:
    edges = 4 + 4 * 2  # both edges of two ramps, and their order
    buckets = 2 * 3 + 2 + 5  # each negative is found among four edges and added; suffix sums of five buckets
    errors = 2 * 6  # a product and a difference at both edges, their difference, its scaling
    ranks = 2 * 1 + 2 * (2 + 2) + 2 + 2 * 6  # order by score, two passes, running sums, the six operations above
    gradient = 2 + 2 * 7 + 2 * 4 + 2 * 2  # weights, slopes at both edges, prefix sums, offset + slope s_j
    exact_ap = RELEVANT + edges + buckets + errors + ranks + TERMS + gradient
    assert flops.exact_ap(TWO) == exact_ap
    current = 2 + 2 * 9  # 1 - u, and its sums above each positive
    # One positive is better than the other: passes and merge, then sums and queries with weight and with weight 1.
    better = 2 * 1 + (3 * 2 + 3 + 1 + 12) + (3 * 2 + 3 + 6)
    single = 2 * (5 + 1 + 2)
    assert flops.exact_rs(TWO) == exact_ap + current + better + single + SORTING


def test_one_positive_and_one_negative_by_hand() -> None:
    relevance = 1 + 1  # go delta below the positive, compare the negative with that
    comparisons = 5 + 5  # H with itself and with the negative
    sums = 1 + 1
    terms = 5  # rank, l_R, 1 / rank, - l_R, sum of the loss
    gradient = 2  # weight times H, added to the negative
    division = 1 + 1 + 1  # loss, positive, negative
    assert flops.pairwise_ap(ONE) == relevance + comparisons + sums + terms + gradient + division
    # A single positive has no better one, and needs no sorting.
    assert flops.exact_rs(ONE) - flops.exact_ap(ONE) == (1 + 9) + (5 + 1 + 2) + (7 + 1 + 1)


@pytest.mark.parametrize(("method", "low", "high"), [("pairwise", 3.9, 4), ("bucketed", 3.5, 4), ("exact", 2, 2.3)])
@pytest.mark.parametrize("loss", LOSSES)
def test_growth_when_everything_doubles(loss: str, method: str, low: float, high: float) -> None:
    once, twice = (FORMULAS[loss, method](Counts(n, 10 * n, 9 * n, n)) for n in (1000, 2000))
    assert low < twice / once < high


@pytest.mark.parametrize(("n", "comparisons"), [(0, 0), (1, 0), (2, 2), (3, 6), (8, 24), (9, 36)])
def test_sort_is_n_log_n(n: int, comparisons: int) -> None:
    assert flops.sort(n) == comparisons


def test_search_is_log_n() -> None:
    assert [flops.search(n) for n in range(1, 20)] == [math.ceil(math.log2(n + 1)) for n in range(1, 20)]


def test_score_based_losses_by_hand() -> None:
    sigmoid = 1 + 8 + 1 + 1  # negation, exp, sum, division
    cross_entropy = 1 + 1 + 1 + (1 + 1 + 8 + 1 + 8) + 1  # max, product, difference, log(1 + exp(-|x|)), sum
    mean_and_weight = 1 + 1
    assert flops.cross_entropy(3) == 3 * (cross_entropy + 1 + sigmoid + 2) + mean_and_weight
    weights = 5 + 4 + 1 + 1 + 2 + 1  # p_t, alpha_t, 1 - p_t, its square, two products, the sum
    backward = 3 + 2 + 1 + 4 + 3 + (sigmoid + 2) + 1  # each of the above in reverse, the cross-entropy, their sum
    assert flops.focal(3) == 3 * (sigmoid + cross_entropy + weights + backward)


def test_every_contender_has_a_count() -> None:
    assert set(FORMULAS) == {(loss, method) for loss in LOSSES for method in METHODS.values()}
    counts = Counts(positives=2, negatives=6, relevant=5, buckets=3)
    assert count_operations("focal", None, counts) == flops.focal(8)
    assert count_operations("bce", None, counts) == flops.cross_entropy(8)
    assert count_operations("sort", None, counts) == 24
    assert (
        count_operations("exact-torch", "rs", counts)
        == count_operations("exact-fused", "rs", counts)
        == flops.exact_rs(counts)
    )
