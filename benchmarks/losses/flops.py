"""Formulas for the floating-point operations of a loss, forward and gradient, all counted by one rule.

The rule, for floating-point numbers: ``+  -  *  /``, negation, absolute value, a comparison, min and max count 1 each
(so a clamp counts 2); exp and log count 8 each, about what their polynomials cost. A sum of n numbers counts n. Sorting
n numbers counts n ceil(log2 n) comparisons, a binary search among n counts ceil(log2(n + 1)), merging a with b counts
a + b. Integers, indexing, copies and selections are free.

The formulas count the steps of the algorithms, for delta > 0: the paper's Algorithm 1 (``pairwise``), its Algorithm 2
(``bucketed``), and exact bucketing. They do not count the instructions of an implementation: a kernel that looks
buckets up in a table instead of searching them needs fewer, one that computes a value twice needs more.

Letters: P positives, M negatives, N relevant negatives (at most delta below the lowest positive), B buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

TRANSCENDENTAL = 8
STEP = 5  # H of a difference: subtract, scale, shift, max, min
SIGMOID = TRANSCENDENTAL + 3  # 1 / (1 + exp(-x))
CROSS_ENTROPY = 2 * TRANSCENDENTAL + 7  # max(x, 0) - x t + log(1 + exp(-|x|))


class Counts(NamedTuple):
    """The variables of the formulas: P, M, N, B."""

    positives: int
    negatives: int
    relevant: int
    buckets: int


def sort(n: int) -> int:
    """Return n ceil(log2 n): the comparisons to sort n numbers.

    >>> sort(8)
    24
    """
    return n * (n - 1).bit_length() if n > 1 else 0


def search(n: int) -> int:
    """Return ceil(log2(n + 1)): the comparisons of a binary search among n sorted numbers."""
    return n.bit_length()


def focal(n: int) -> int:
    """Count the sigmoid focal loss of n logits, operation by operation as automatic differentiation runs it."""
    # p_t: 5, alpha_t: 4, 1 - p_t: 1, its square: 1, two products, the sum
    forward = SIGMOID + CROSS_ENTROPY + 14
    # Through the products: 3, the square: 2, 1 - p_t: 1, p_t: 4, the sigmoid: 3; through the cross-entropy:
    # (sigmoid(x) - t) g; their sum: 1
    backward = 13 + (SIGMOID + 2) + 1
    return n * (forward + backward)


def cross_entropy(n: int) -> int:
    """Count the binary cross-entropy of n logits, its mean, and the gradient (sigmoid(x) - t) / n."""
    return n * (CROSS_ENTROPY + 1) + 1 + n * (SIGMOID + 2) + 1


def _relevance(c: Counts) -> int:
    return c.positives + c.negatives  # P - 1 to find the lowest positive, 1 to go delta below it, M comparisons


def _ranking(c: Counts) -> int:
    """Count per positive rank, l_R, 1 / rank, the sign of the gradient, the sum of the loss; then the division by P."""
    return 5 * c.positives + c.positives + 1


def _sorting(c: Counts) -> int:
    """Count per positive l_S, l_S*, e, the test of D, e / D, the gradient, the sum of the loss; then division by P."""
    return 7 * c.positives + c.positives + 1


def _sorting_pairs(p: int) -> int:
    """Count 1 - u per positive, and per pair (1 - u_j) H: 2, u_j >= u_i: 1, restricted sums: 3, H e / D: 2."""
    return p + 8 * p * p


def pairwise_ap(c: Counts) -> int:
    """Return P (6 P + 8 N) + O(P + M): H and its sum; for negatives also the weight times H, for the gradient."""
    pairs = (STEP + 1) * c.positives * c.positives + (STEP + 3) * c.positives * c.relevant
    return _relevance(c) + pairs + _ranking(c) + c.relevant


def pairwise_rs(c: Counts) -> int:
    """Return :func:`pairwise_ap` + 8 P^2 + O(P)."""
    return pairwise_ap(c) + _sorting_pairs(c.positives) + _sorting(c)


def bucketed_ap(c: Counts) -> int:
    """Return (P + M) log(P + M) + P (6 P + 9 B) + O(P + M); the sum is weighted by the size of the bucket."""
    means = c.relevant + c.buckets
    pairs = (STEP + 1) * c.positives * c.positives + (STEP + 4) * c.positives * c.buckets
    return sort(c.positives + c.negatives) + _relevance(c) + means + pairs + _ranking(c) + c.buckets


def bucketed_rs(c: Counts) -> int:
    """Return :func:`bucketed_ap` + 8 P^2 + O(P)."""
    return bucketed_ap(c) + _sorting_pairs(c.positives) + _sorting(c)


def _sums_above_better(p: int, *, unit: bool) -> int:
    """Count sum_j w_j H(s_j - s_i) over better labels, for a real weight and (``unit``) also for weight 1.

    The sums over the better half of the labels are computed for the worse half, then each half is divided in the same
    way. Both halves are sorted by score, so two passes find the thresholds, and a merge sorts their union.
    """
    if p < 2:
        return 0
    better, worse = p - p // 2, p // 2
    sums = 3 * better + unit * better  # w s and two running sums; with weight 1 one of them is an integer, thus free
    queries = (1 + unit) * 6 * worse  # S1 - tau S0 at both edges, their difference, the running total
    inner = _sums_above_better(better, unit=unit) + _sums_above_better(worse, unit=unit)
    return inner + 3 * (better + worse) + sums + queries


def exact_ap(c: Counts) -> int:
    """Return O(P log P + N log P + M)."""
    p, n = c.positives, c.relevant
    edges = 2 * p + sort(2 * p)
    buckets = n * search(2 * p) + n + (2 * p + 1)  # find and add each negative; suffix sums
    false_positives = 6 * p  # S1 - tau S0 at both edges, their difference, its scaling
    rank = sort(p) + 2 * (p + p) + p + 6 * p  # the same among the positives: two passes, running sums
    gradient = p + 7 * p + 4 * p + 2 * n  # weight / P; slope, and at both edges 3; prefix sums; offset + slope s_j
    return _relevance(c) + edges + buckets + false_positives + rank + _ranking(c) + gradient


def exact_rs(c: Counts) -> int:
    """Return :func:`exact_ap` + O(P log P)."""
    p = c.positives
    current = p + 9 * p  # 1 - u, and its sums above each positive, in the passes of the ranks
    better = sort(p) + _sums_above_better(p, unit=True) + _sums_above_better(p, unit=False)
    single = 5 * p + p + 2 * p  # both restricted sums: scaling, the positive itself; D; the demotion: scaling, sum
    return exact_ap(c) + current + better + single + _sorting(c)


FORMULAS: dict[tuple[str, str], Callable[[Counts], int]] = {
    ("ap", "pairwise"): pairwise_ap,
    ("ap", "bucketed"): bucketed_ap,
    ("ap", "exact"): exact_ap,
    ("rs", "pairwise"): pairwise_rs,
    ("rs", "bucketed"): bucketed_rs,
    ("rs", "exact"): exact_rs,
}
