"""Many small rankings compared together in torch operations, for CPUs without numba.

A loop over thousands of rankings spends its time on calls. Here each operation handles all pairs of a group of
rankings: every positive with every entry of its own ranking, as in the definition. The pairs are listed one ranking
after the other, without padding, and are computed again in the backward pass instead of stored. Each ranking has its
own sums, so its numbers do not depend on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from bucketrank.losses.comparison import Array, TorchComparison, precise, step_
from bucketrank.losses.pairwise import in_range

# Maximum pairs of a ranking in a group; beyond it bucketing one ranking alone is faster.
MAX_PAIRS = 1 << 16
# Pairs after which a group is closed, which bounds the memory.
PAIRS_PER_GROUP = 1 << 18


def groups(sizes: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Divide consecutive rankings of these lengths and positives into groups, each ``(first, stop)``.

    A ranking of more than MAX_PAIRS pairs is a group of its own.
    """
    first = pairs = 0
    for number, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        own = size * count
        if number > first and (own > MAX_PAIRS or pairs + own > PAIRS_PER_GROUP):
            yield first, number
            first, pairs = number, 0
        pairs += own
        if own > MAX_PAIRS:
            yield first, number + 1
            first, pairs = number + 1, 0
    if first < len(sizes):
        yield first, len(sizes)


class Ragged(TorchComparison):
    """The definition of a group of rankings of these ``sizes``; vectors over positives concatenate the rankings.

    The value of a ranking with NaN or Inf is NaN; ``overfull`` makes all values NaN.
    """

    def __init__(
        self, logits: Tensor, targets: Tensor, delta: float, sizes: Sequence[int], *, overfull: bool = False
    ) -> None:
        self.logits, self.targets = logits, targets
        self.lengths = torch.tensor(sizes, dtype=torch.int64)
        self.starts = self.lengths.cumsum(0) - self.lengths
        ranking = torch.arange(len(sizes)).repeat_interleave(self.lengths)
        self.broken = torch.full((len(sizes),), overfull)
        self.broken[ranking[~(logits.isfinite() & targets.isfinite()) & (targets >= 0)]] = True
        # Broken rankings hold arbitrary finite numbers.
        self.values, self.delta = in_range(precise(logits).nan_to_num(), delta)
        positives = (targets > 0).nonzero().squeeze(1)
        order = self.values[positives].argsort(stable=True)
        self.order = order[ranking[positives[order]].argsort(stable=True)]
        self.index = positives[self.order]
        self.scores = self.values[self.index]
        self.ranking = ranking[self.index]
        self.counts = torch.bincount(self.ranking, minlength=len(sizes))
        self.entry_ranking = ranking

    @cached_property
    def labels(self) -> Array:
        return precise(self.targets[self.index]).nan_to_num()

    def positives_per_ranking(self) -> list[int]:
        counts: list[int] = self.counts.tolist()
        return counts

    def by_score(self, values: Tensor) -> Array:
        return precise(values)[self.order]

    def by_position(self, values: Array) -> Tensor:
        return torch.empty_like(values).index_copy_(0, self.order, values)

    def share(self, upstream: Tensor) -> Array:
        each = (precise(upstream) / self.counts.clamp(min=1)).masked_fill(self.broken, torch.nan)
        return each[self.ranking]

    def mean(self, errors: Array) -> Tensor:
        totals = torch.zeros(len(self.counts), dtype=errors.dtype).index_add_(0, self.ranking, errors)
        means = (totals / self.counts.clamp(min=1)).masked_fill_(self.broken, torch.nan)
        return means.to(self.logits.dtype)

    def running_minimum(self, values: Array) -> Array:
        row, column = self._pairs_of_positives
        below = column <= row
        return values.scatter_reduce(0, row[below], values[column[below]], "amin")

    def sum_below(self, values: Array) -> Array:
        row, column = self._pairs_of_positives
        below = self.scores[column] <= self.scores[row]
        return torch.zeros_like(values).index_add_(0, row[below], values[column[below]])

    def false_positives(self) -> Array:
        row, _, compared = self._negatives()
        return torch.zeros_like(self.scores).index_add_(0, row, compared)

    def above(self, values: Array) -> Array:
        row, column = self._pairs_of_positives
        compared = step_(self.scores[column] - self.scores[row], self.delta)
        return torch.zeros_like(values).index_add_(0, row, compared[:, None] * values[column])

    def above_worse(self, values: Array) -> Array:
        row, column, compared = self._missorted()
        return torch.zeros_like(values).index_add_(0, row, compared[:, None] * values[column])

    def below_better(self, values: Array) -> Array:
        row, column, compared = self._missorted()
        return torch.zeros_like(values).index_add_(0, column, compared * values[row])

    def spread(self, weights: Array, own: Array) -> Tensor:
        row, entry, compared = self._negatives()
        sums = torch.zeros_like(self.values).index_add_(0, entry, compared * weights[row])
        gradient = sums.to(self.logits.dtype).index_copy_(0, self.index, own.to(self.logits.dtype))
        return gradient.masked_fill_(self.broken[self.entry_ranking] & (self.targets >= 0), torch.nan)

    def _missorted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positives, the positives of a lower label in their rankings, and H of the second above the first."""
        row, column = self._pairs_of_positives
        worse = self.labels[column] < self.labels[row]
        row, column = row[worse], column[worse]
        return row, column, step_(self.scores[column] - self.scores[row], self.delta)

    def _negatives(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positives, the positions of the negatives in their rankings, and H of the second above the first."""
        row, entry = _all_pairs(self.starts[self.ranking], self.lengths[self.ranking])
        negative = self.targets[entry] == 0
        row, entry = row[negative], entry[negative]
        return row, entry, step_(self.values[entry] - self.scores[row], self.delta)

    @property
    def _pairs_of_positives(self) -> tuple[Tensor, Tensor]:
        first = self.counts.cumsum(0) - self.counts
        return _all_pairs(first[self.ranking], self.counts[self.ranking])


def _all_pairs(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Pair each row with the columns ``starts`` to ``starts + lengths``; return rows and columns of all pairs."""
    row = torch.arange(len(starts)).repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    return row, torch.arange(len(row)) + (starts - first)[row]
