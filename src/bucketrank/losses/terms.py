"""The ranking losses, each written once for every method: errors, and gradients by identity update (paper, Eq. 8).

Each function turns the sums of a :class:`Comparison` into :class:`Terms`. All vectors run over the P positives, lowest
logit first, and are torch tensors or numpy arrays, depending on the comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from bucketrank.losses.comparison import Array, Comparison, step_at_tie

# aLRP passes no gradient from a positive with fewer false positives than this, as in its published code.
ALRP_MIN_FALSE_POSITIVES = 1e-5


class Gradients(NamedTuple):
    """Gradients before the division by P, as vectors over the positives."""

    # The first value has the gradient sum_i w_i H(s_j - s_i) at negative j; these are the weights w.
    negative_weights: Array
    # Gradients of the first and the second value at the logits of the positives.
    positives: Array
    second_positives: Array | None = None
    # Gradient of the second value at the localisation errors.
    localisation: Array | None = None


class Terms(NamedTuple):
    """The errors of each positive and their gradients. A value of the loss is the mean of its errors."""

    first: Array
    second: Array | None
    gradients: Gradients


def average_precision(comparison: Comparison) -> Terms:
    """AP loss, ``FP(i) / rank(i)``: the share of negatives among the entries at or above each positive."""
    return _precision_terms(*comparison.ranks())


def _precision_terms(false_positives: Array, rank: Array) -> Terms:
    error = false_positives / rank
    # 0 - error instead of -error, which would be -0. where there is no error.
    return Terms(error, None, Gradients(negative_weights=1 / rank, positives=0 - error))


def interpolated_average_precision(comparison: Comparison) -> Terms:
    """Original AP loss: each positive counts itself as 1 and takes the best precision at or below its score."""
    false_positives, rank = _ranks_with_itself_as_1(comparison)
    own_error = false_positives / rank
    error = comparison.running_minimum(own_error)
    # The gradients at the negatives sum to the error. Where the positive's own error is 0, no negative ranks above it.
    weights = error / comparison.xp.where(own_error > 0, own_error, 1) / rank
    return Terms(error, None, Gradients(negative_weights=weights, positives=0 - error))


def rank_sort(comparison: Comparison) -> Terms:
    """RS loss: the AP error, and the sorting error ``l_S(i) - l_S*(i)`` of the positives ranked above."""
    xp = comparison.xp
    labels = comparison.labels[:, None]
    values = xp.concatenate([xp.ones_like(labels), 1 - labels], 1)  # np.stack is slower on small inputs
    false_positives = comparison.false_positives()
    all_count, all_sum = comparison.above(values).T
    worse_count, worse_sum = comparison.above_worse(values).T
    ranking = _precision_terms(false_positives, all_count + false_positives)
    # l_S - l_S* = worse_count / all_count * (mean of the worse - mean of the others). In this form the error is exactly
    # zero where nothing is missorted.
    missorted = worse_count > 0
    mean_worse = worse_sum / xp.where(missorted, worse_count, 1)
    mean_others = (all_sum - worse_sum) / (all_count - worse_count)
    share = xp.where(missorted, (mean_worse - mean_others) / all_count, 0)
    sorting_error = share * worse_count
    demotion = comparison.below_better(share)
    return Terms(ranking.first, sorting_error, ranking.gradients._replace(second_positives=demotion - sorting_error))


def check_localisation(localisation: Tensor | None, positives: int) -> None:
    """Raise ValueError unless every positive has one localisation error."""
    if localisation is not None and localisation.numel() != positives:
        raise ValueError(
            "alrp_loss: expected one localisation error for each of logits[targets > 0], "
            f"{positives} of them, got {localisation.numel()}"
        )


def alrp(comparison: Comparison, localisation: Array) -> Terms:
    """aLRP loss: the AP error with a localisation-aware gradient, and the rank-weighted localisation error."""
    xp = comparison.xp
    false_positives, rank = _ranks_with_itself_as_1(comparison)
    others = comparison.above(localisation[:, None])[:, 0] - step_at_tie(comparison.delta) * localisation
    pushes = false_positives > ALRP_MIN_FALSE_POSITIVES
    push = xp.where(pushes, (others + false_positives) / rank, 0)
    weights = push / xp.where(pushes, false_positives, 1)
    # The mean over i of (sum of localisation_j over s_j >= s_i) / rank(i) equals the mean over j of
    # localisation_j * factors_j.
    factors = comparison.sum_below(1 / rank)
    gradients = Gradients(negative_weights=weights, positives=0 - push, localisation=factors)
    return Terms(false_positives / rank, factors * localisation, gradients)


def _ranks_with_itself_as_1(comparison: Comparison) -> tuple[Array, Array]:
    """Return FP(i) and rank(i), where positive i counts itself as 1 instead of H(0)."""
    false_positives, rank = comparison.ranks()
    return false_positives, rank + (1 - step_at_tie(comparison.delta))


RANKING_LOSSES: dict[str, Callable[..., Terms]] = {
    "ap": average_precision,
    "interpolated_ap": interpolated_average_precision,
    "rs": rank_sort,
    "alrp": alrp,
}
