"""Compare the positives of large rankings with each other in O(P log P), without a device sync.

The tiles of ``pairs.py`` take P x P comparisons. Here, sums over *all* positives above a score are differences of
running sums. The sums over those with a lower label, for RS, come from a wavelet tree. It orders the positives by score
at its root. Each level halves every node by label, lower labels first, and keeps the order by score. The positives with
a lower label than a given one are at most one left half per level, and the ones above a score are the end of that half.

Positions on the score axis are integers. A step from one score to the next is clipped to 2 delta, beyond which every H
is 0 or 1. So H is exact to the last digit kept, ties are ties, and no digits are lost far from 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from bucketrank.losses.triton.launch import Launcher
from bucketrank.losses.triton.levels import add_better, add_worse, scan_tiles, sum_above, total_tiles

if TYPE_CHECKING:
    from bucketrank.losses.triton.ranking import Arrays, Plan

# Positives per program: of a scan, and of a step to the next level, at least one per thread.
SCAN, QUERY = 1024, 256


class Windows(NamedTuple):
    """For each positive, the neighbours with H between 0 and 1: low <= j < high.

    Score j is at ``cell + fractions[j]`` in units of 2 delta. H(s_j - s_i) is ``fractions[j] + offsets[i]`` below
    the middle, and 1 more from there on, where the next cell begins.
    """

    cuts: Tensor  # (3 P,) int32: low, middle, high
    offsets: Tensor  # (P,) float64
    fractions: Tensor  # (P,) float64


class PositiveTree:
    """The positives of one call by ranking and score, and the launches that compare them."""

    def __init__(self, launch: Launcher, plan: Plan, arrays: Arrays) -> None:
        self.launch, self.plan, self.arrays = launch, plan, arrays
        size, device = plan.positives, arrays.scores.device
        firsts = arrays.first_positives[: plan.rankings + 1]
        self.rows = torch.arange(size, dtype=torch.int32, device=device)
        # Padding comes after the last ranking, as if it were one more.
        self.ranking = torch.searchsorted(firsts[1:].contiguous(), self.rows, right=True)
        self.ends = firsts[(self.ranking + 1).clamp_(max=plan.rankings)]
        self.begins = torch.diff(self.ranking, prepend=self.ranking[:1] - 1) > 0
        self.above, self.below = self._windows(self.begins | (self.ranking == plan.rankings))
        self.levels = (size - 1).bit_length()
        self.label_ranks = self.rows
        self.tiles = triton.cdiv(size, SCAN)
        self.left_totals, self.totals = self._empty(self.tiles), self._empty(3 * self.tiles, torch.float64)
        self.sums = self._empty(3 * (size + 1), torch.float64)
        # A level reads one of them and writes the other.
        self.orders = self._empty(size), self._empty(size)
        self.lefts = self._empty(size + 1), self._empty(size + 1)

    def _empty(self, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.arrays.scores.device)

    def _windows(self, begins: Tensor) -> tuple[Windows, Windows]:
        """Return the windows for sums over the positives above, and for sums over those below.

        They differ only at delta 0, where ties count in both sums.
        """
        scores, delta = self.arrays.scores[: self.plan.positives].double(), self.plan.delta
        steps = torch.diff(scores, prepend=scores[:1])
        if delta == 0:
            place = (begins | (steps > 0)).cumsum(0)
            zeros = torch.zeros_like(steps)
            above, below = (torch.searchsorted(place, place, right=right).int() for right in (False, True))
            return Windows(above.repeat(3), zeros, zeros), Windows(below.repeat(3), zeros, zeros)
        # The highest place is below 2 ** 61.
        digits = 61 - scores.numel().bit_length()
        one, half = 1 << digits, 1 << digits - 1
        steps = (steps * (0.5 / delta)).clamp_(max=1).masked_fill_(begins, 1)
        place = steps.mul_(one).round_().to(torch.int64).cumsum(0)
        lowest, in_cell = place - half, one - 1
        low = torch.searchsorted(place, lowest, right=True)
        high = torch.searchsorted(place, place + half)
        # The next cell begins after the last place of the cell of ``lowest``.
        middle = torch.searchsorted(place, lowest | in_cell, right=True).clamp_(low, high)
        offsets, fractions = (lowest & in_cell).double().div_(-one), (place & in_cell).double().div_(one)
        windows = Windows(torch.cat([low, middle, high]).int(), offsets, fractions)
        return windows, windows

    def compare(self, copies: dict[str, int]) -> None:
        """Write what ``compare_positives`` writes."""
        plan, arrays, size = self.plan, self.arrays, self.plan.positives
        weights, tied = self.above.fractions, self.rows
        if plan.loss == "rs":
            weights = _finite(arrays.labels[:size])
            worse, self.better = self._rank_by_label()
        if plan.loss == "alrp":
            weights = _finite(arrays.errors[:size])
            scores = arrays.scores[:size]
            place = (self.begins | (torch.diff(scores, prepend=scores[:1]) != 0)).cumsum(0)
            tied = torch.searchsorted(place, place).int()
        columns = {"FIRST": 0 if plan.has_second else 2, "LAST": 2}
        self._scan(self.rows, weights, 0, **columns)
        self.launch(
            sum_above,
            triton.cdiv(size, QUERY),
            *(self.above.cuts, self.above.offsets, self.ends, tied, arrays.errors, arrays.first_positives),
            *(arrays.buckets, self.sums, arrays.ranks, arrays.shares, arrays.seconds, size, plan.rankings),
            LOSS=plan.loss,
            SMOOTH=plan.is_smooth,
            **copies,
            BLOCK=QUERY,
        )
        if plan.loss == "rs":
            counts = torch.zeros_like(weights)
            outputs = weights, counts, arrays.ranks, arrays.shares, arrays.seconds
            self._walk(add_worse, worse, self.above, weights, outputs, **columns)

    def demote(self) -> None:
        """Write what ``demote_positives`` writes."""
        shares, columns = self.arrays.shares[: self.plan.positives], {"FIRST": 0, "LAST": 1}
        self._scan(self.rows, shares, 0, **columns)
        outputs = self.arrays.seconds, self.arrays.second_own
        self._walk(add_better, self.better, self.below, shares, outputs, **columns)

    def _rank_by_label(self) -> tuple[Tensor, Tensor]:
        """Order the positives by ranking and label; return the first and the last rank of each one's equals."""
        by_label = self.arrays.labels[: self.plan.positives].sort(stable=True).indices
        by_label = by_label[self.ranking[by_label].sort(stable=True).indices]
        labels, ranking = self.arrays.labels[by_label], self.ranking[by_label]
        is_higher = torch.diff(labels, prepend=labels[:1]) != 0
        is_higher |= torch.diff(ranking, prepend=ranking[:1]) != 0
        place = is_higher.cumsum(0)
        first, last = torch.empty_like(self.rows), torch.empty_like(self.rows)
        first[by_label] = torch.searchsorted(place, place).int()
        last[by_label] = torch.searchsorted(place, place, right=True).int() - 1
        self.label_ranks = torch.empty_like(self.rows)
        self.label_ranks[by_label] = self.rows
        return first, last

    def _scan(self, order: Tensor, weights: Tensor, depth: int, **columns: int) -> None:
        """Write the running sums in this order, and split the nodes for the next depth."""
        level = self.levels - depth - 1 if self.plan.loss == "rs" else -1
        inputs = order, self.label_ranks, weights, self.above.fractions, self.totals, self.left_totals
        sizes = self.plan.positives, level
        self.launch(total_tiles, self.tiles, *inputs, *sizes, **columns, BLOCK=SCAN)
        outputs = self.sums, self.lefts[depth % 2], self.orders[depth % 2]
        self.launch(scan_tiles, self.tiles, *inputs, *outputs, *sizes, **columns, BLOCK=SCAN)

    def _walk(
        self, add: Any, bounds: Tensor, windows: Windows, weights: Tensor, outputs: tuple[Tensor, ...], **columns: int
    ) -> None:
        """Descend the tree from the root, level by level, and add up."""
        size, cuts = self.plan.positives, windows.cuts.clone()
        for depth in range(self.levels):
            self._scan(self.orders[depth % 2], weights, depth + 1, **columns)
            inputs = bounds, cuts, windows.offsets, self.lefts[depth % 2], self.sums
            sizes = size, self.levels - depth - 1
            self.launch(add, triton.cdiv(size, QUERY), *inputs, *outputs, *sizes, BLOCK=QUERY)


def _finite(weights: Tensor) -> Tensor:
    """Return the weights in float64, with 0 for those that are not finite: running sums pass every ranking."""
    return weights.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
