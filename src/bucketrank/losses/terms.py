"""The losses, written once for every method: values, and gradients by identity update (paper, Eq. 8).

Each function turns the sums of a :class:`Comparison` into :class:`Terms`. All vectors are over the P positives,
lowest logit first; torch tensors or numpy arrays, as the comparison has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import NamedTuple

from bucketrank.losses.comparison import Array, Comparison
from bucketrank.losses.step import step_at_tie

# aLRP passes no gradient from a positive with fewer false positives than this, as its authors have it.
ALRP_LEAST_FALSE_POSITIVES = 1e-5


class Terms(NamedTuple):
    """One value or two, and what the backward pass needs."""

    first: Array
    second: Array | None
    # Of each positive: the weight w_i with which it pushes down the negatives j, each by w_i H(s_j - s_i), for the
    # first value; the gradients of the first and, if there is one, of the second value at its own logit; for aLRP,
    # that of the second value at its localisation error.
    vectors: Sequence[Array]


@singledispatch
def average_precision(comparison: Comparison) -> Terms:
    """AP loss: the mean share of negatives among what ranks at or above a positive."""
    false_positives = comparison.false_positives()
    rank = _rank_among_positives(comparison) + false_positives
    error = false_positives / rank
    return _means((error,), (1 / rank, 0 - error))  # 0 - error, as -error would print as -0. where there is none


def interpolated_average_precision(comparison: Comparison) -> Terms:
    """The original AP loss: a positive counts itself as 1, and takes the best precision found at or below it."""
    false_positives = comparison.false_positives()
    rank = _rank_among_positives(comparison, itself=1) + false_positives
    own_error = false_positives / rank
    error = comparison.running_minimum(own_error)
    # The mass pushed down the negatives is that of the error. Without an own error there is no false positive to
    # push.
    weights = error / comparison.xp.where(own_error > 0, own_error, 1) / rank
    return _means((error,), (weights, 0 - error))


def rank_sort(comparison: Comparison) -> Terms:
    """RS loss: the ranking error of AP, and how much worse than they should be the positives above a positive are."""
    xp = comparison.xp
    values = xp.stack([xp.ones_like(comparison.labels), 1 - comparison.labels], 1)
    false_positives = comparison.false_positives()
    all_count, all_sum = comparison.above(values).T
    worse_count, worse_sum = comparison.above_worse(values).T
    rank = all_count + false_positives
    error = false_positives / rank
    # l_S - l_S* = worse_count / all_count * (mean of the worse - mean of the others): as a difference of means it is
    # zero without rounding where nothing is missorted, and so is its share per unit of missorted mass.
    missorted = worse_count > 0
    mean_worse = worse_sum / xp.where(missorted, worse_count, 1)
    mean_others = (all_sum - worse_sum) / (all_count - worse_count)
    share = xp.where(missorted, (mean_worse - mean_others) / all_count, 0)
    sorting_error = share * worse_count
    demotion = comparison.below_better(share)
    return _means((error, sorting_error), (1 / rank, 0 - error, demotion - sorting_error))


def alrp(comparison: Comparison, localisation: Array) -> Terms:
    """aLRP loss: AP loss, with a gradient that counts localisation errors too; and those errors, weighted by rank."""
    xp, scores = comparison.xp, comparison.scores
    false_positives = comparison.false_positives()
    rank = _rank_among_positives(comparison, itself=1) + false_positives
    others = comparison.above(localisation[:, None])[:, 0] - step_at_tie(comparison.delta) * localisation
    pushes = false_positives > ALRP_LEAST_FALSE_POSITIVES
    push = xp.where(pushes, (others + false_positives) / rank, 0)
    weights = push / xp.where(pushes, false_positives, 1)
    # mean over i of (sum of localisation_j over s_j >= s_i) / rank(i) = mean over j of localisation_j * factors_j
    last_tied = xp.searchsorted(scores, scores, side="right") - 1
    factors = (1 / rank).cumsum(0)[last_tied]
    return _means((false_positives / rank, factors * localisation), (weights, 0 - push, 0 * rank, factors))


def _rank_among_positives(comparison: Comparison, itself: float | None = None) -> Array:
    """rank+(i), the positive itself counted as H(0), or as told."""
    rank = comparison.above(comparison.xp.ones_like(comparison.scores)[:, None])[:, 0]
    return rank if itself is None else rank + (itself - step_at_tie(comparison.delta))


def _means(values: Sequence[Array], vectors: Sequence[Array]) -> Terms:
    """The terms as means over the positives."""
    positives = len(vectors[0])
    first, second = (*(value.sum() / positives for value in values), None)[:2]
    return Terms(first, second, [vector / positives for vector in vectors])
