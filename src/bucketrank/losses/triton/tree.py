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
import triton.language as tl
from torch import Tensor

from bucketrank.losses.triton.device import count_copies
from bucketrank.losses.triton.launch import Launcher
from bucketrank.losses.triton.pairs import add_copies

if TYPE_CHECKING:
    from bucketrank.losses.triton.ranking import Arrays, Plan

# Positives per program: of a scan, and of a query.
SCAN, QUERY = 1024, 256


@triton.jit
def _column(weights, fractions, row, inside, COLUMN: tl.constexpr):
    """Return a column of the sums: weights, weights times fractions, fractions."""
    if COLUMN == 2:
        value = tl.load(fractions + row, mask=inside, other=0.0)
    else:
        value = tl.load(weights + row, mask=inside, other=0.0)
        if COLUMN == 1:
            value *= tl.load(fractions + row, mask=inside, other=0.0)
    return value


@triton.jit
def _goes_left(label_ranks, row, inside, level):
    """Return 1 for the positives that the split at ``level`` moves to a left half, otherwise 0."""
    rank = tl.load(label_ranks + row, mask=inside, other=0)
    return tl.where(inside & (((rank >> level) & 1) == 0), 1, 0), rank


@triton.jit
def _before(totals, tile, BLOCK: tl.constexpr):
    """Return the sum of the first ``tile`` totals."""
    sums = tl.zeros((BLOCK,), totals.dtype.element_ty)
    start = tile * 0
    while start < tile:
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(totals + at, mask=at < tile, other=0)
        start += BLOCK
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["positives", "level"])
def total_tiles(
    level_order,
    label_ranks,
    weights,
    fractions,
    totals,
    left_totals,
    positives,
    level,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sums of the columns FIRST to LAST over a tile, and how many of its positives go left at ``level``."""
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    inside = at < positives
    row = tl.load(level_order + at, mask=inside, other=0)
    for column in tl.static_range(FIRST, LAST + 1):
        tl.store(totals + column * tiles + tile, tl.sum(_column(weights, fractions, row, inside, column), 0))
    if level >= 0:
        left, _ = _goes_left(label_ranks, row, inside, level)
        tl.store(left_totals + tile, tl.sum(left, 0))


@triton.jit(do_not_specialize=["positives", "level"])
def scan_tiles(
    level_order,
    label_ranks,
    weights,
    fractions,
    totals,
    left_totals,
    sums,
    lefts,
    next_order,
    positives,
    level,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the running sums of the columns in ``level_order``; if ``level`` is not negative, also split its nodes.

    ``sums[k]`` and ``lefts[k]`` are over the first k positives. The ranks by label are a permutation, so the node of
    rank r starts at position r, rounded down, and half of the positives before it are in left halves.
    """
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    inside = at < positives
    row = tl.load(level_order + at, mask=inside, other=0)
    for column in tl.static_range(FIRST, LAST + 1):
        value = _column(weights, fractions, row, inside, column)
        before = _before(totals + column * tiles, tile, BLOCK)
        own = sums + column * (positives + 1)
        tl.store(own + at + 1, before + tl.cumsum(value, 0), mask=inside)
        if tile == 0:
            tl.store(own, 0.0)
    if level >= 0:
        left, rank = _goes_left(label_ranks, row, inside, level)
        reached = _before(left_totals, tile, BLOCK) + tl.cumsum(left, 0)
        tl.store(lefts + at + 1, reached, mask=inside)
        if tile == 0:
            tl.store(lefts, 0)
        start = (rank >> (level + 1)) << (level + 1)
        lefts_inside = reached - left - (start >> 1)
        position = tl.where(left > 0, start + lefts_inside, at - lefts_inside + (1 << level))
        tl.store(next_order + position, row, mask=inside)


@triton.jit(do_not_specialize=["positives", "rankings"])
def sum_above(
    cuts,
    offsets,
    ends,
    first_tied,
    errors,
    first_positives,
    buckets,
    sums,
    ranks,
    shares,
    seconds,
    positives,
    rankings,
    LOSS: tl.constexpr,
    SMOOTH: tl.constexpr,
    COPIES: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum over all positives of the ranking; also add up the copies of the buckets. Writes what tiles write.

    For RS, ``seconds`` gets the sum of H times the labels, and ``shares`` 0.
    """
    PER_POSITIVE: tl.constexpr = 2 if SMOOTH else 1
    edges, copies = count_copies(first_positives, rankings, PER_POSITIVE, COPIES, BUCKETS)
    add_copies(buckets, 0, edges, tl.program_id(0), edges, copies, BLOCK * PER_POSITIVE)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < positives
    low = tl.load(cuts + row, mask=inside, other=0)
    middle = tl.load(cuts + positives + row, mask=inside, other=0)
    high = tl.load(cuts + 2 * positives + row, mask=inside, other=0)
    end = tl.load(ends + row, mask=inside, other=0)
    offset = tl.load(offsets + row, mask=inside, other=0.0)
    fractions = sums + 2 * (positives + 1)
    count = tl.load(fractions + high, mask=inside, other=0.0) - tl.load(fractions + low, mask=inside, other=0.0)
    count += offset * (high - low).to(tl.float64) + (end - middle).to(tl.float64)
    tl.store(ranks + row, count, mask=inside)
    if LOSS == "rs" or LOSS == "alrp":
        products = sums + positives + 1
        at_high = tl.load(sums + high, mask=inside, other=0.0)
        at_end = tl.load(sums + end, mask=inside, other=0.0)
        total = tl.load(products + high, mask=inside, other=0.0) - tl.load(products + low, mask=inside, other=0.0)
        total += offset * (at_high - tl.load(sums + low, mask=inside, other=0.0))
        total += at_end - tl.load(sums + middle, mask=inside, other=0.0)
        if LOSS == "rs":
            tl.store(shares + row, tl.zeros((BLOCK,), tl.float64), mask=inside)
            tl.store(seconds + row, total, mask=inside)
        else:
            error = tl.load(errors + row, mask=inside, other=0.0)
            # The sums leave out errors that are not finite; the ranking of such an error still gets it.
            excluded = tl.where(tl.abs(error) < float("inf"), 0.0, error)
            tied = tl.load(sums + tl.load(first_tied + row, mask=inside, other=0), mask=inside, other=0.0)
            tl.store(shares + row, total - error * (0.5 if SMOOTH else 1.0), mask=inside)
            tl.store(seconds + row, at_end - tied + excluded, mask=inside)


@triton.jit
def _descend(cuts, lefts, row, inside, start, goes_right, level, positives, CUT: tl.constexpr):
    """Move a cut to the next level; return its positions in the left and in the right half."""
    address = cuts + CUT * positives + row
    cut = tl.load(address, mask=inside, other=0)
    lefts_inside = tl.load(lefts + cut, mask=inside, other=0) - (start >> 1)
    left = start + lefts_inside
    # A node at the end may have no right half.
    right = tl.minimum(cut - lefts_inside + (1 << level), positives)
    tl.store(address, tl.where(goes_right, right, left), mask=inside)
    return left, right


@triton.jit(do_not_specialize=["positives", "level"])
def add_worse(
    label_bounds,
    cuts,
    offsets,
    lefts,
    sums,
    weights,
    worse_counts,
    ranks,
    shares,
    seconds,
    positives,
    level,
    BLOCK: tl.constexpr,
):
    """Add one level of the sums over the worse positives above each; after the last level, write the sorting errors.

    ``label_bounds`` is the number of lower labels, ``shares`` collects the sums of H times the labels.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < positives
    bound = tl.load(label_bounds + row, mask=inside, other=0)
    start = (bound >> (level + 1)) << (level + 1)
    goes_right = ((bound >> level) & 1) > 0
    low, _ = _descend(cuts, lefts, row, inside, start, goes_right, level, positives, 0)
    middle, _ = _descend(cuts, lefts, row, inside, start, goes_right, level, positives, 1)
    high, _ = _descend(cuts, lefts, row, inside, start, goes_right, level, positives, 2)
    end = tl.minimum(start + (1 << level), positives)
    adds = inside & goes_right
    offset = tl.load(offsets + row, mask=adds, other=0.0)
    fractions = sums + 2 * (positives + 1)
    count = tl.load(fractions + high, mask=adds, other=0.0) - tl.load(fractions + low, mask=adds, other=0.0)
    count += tl.where(adds, offset * (high - low).to(tl.float64) + (end - middle).to(tl.float64), 0.0)
    products = sums + positives + 1
    total = tl.load(products + high, mask=adds, other=0.0) - tl.load(products + low, mask=adds, other=0.0)
    total += offset * (tl.load(sums + high, mask=adds, other=0.0) - tl.load(sums + low, mask=adds, other=0.0))
    total += tl.load(sums + end, mask=adds, other=0.0) - tl.load(sums + middle, mask=adds, other=0.0)
    count += tl.load(worse_counts + row, mask=inside, other=0.0)
    total += tl.load(shares + row, mask=inside, other=0.0)
    if level > 0:
        tl.store(worse_counts + row, count, mask=inside)
        tl.store(shares + row, total, mask=inside)
    else:
        label = tl.load(weights + row, mask=inside, other=0.0)
        all_count = tl.load(ranks + row, mask=inside, other=1.0)
        others = tl.where(inside, all_count - count, 1.0)
        is_missorted = count > 0
        # The mean label of the others minus the mean label of the worse. Rounding must not make a part negative.
        below = label - total / tl.where(is_missorted, count, 1.0)
        above = (tl.load(seconds + row, mask=inside, other=0.0) - total) / others - label
        excess = tl.minimum(tl.maximum(below, 0.0), label) + tl.maximum(above, 0.0)
        share = tl.where(is_missorted, excess / all_count, 0.0)
        tl.store(shares + row, share, mask=inside)
        tl.store(seconds + row, share * tl.maximum(count, 0.0), mask=inside)


@triton.jit(do_not_specialize=["positives", "level"])
def add_better(
    label_bounds, cuts, offsets, lefts, sums, sorting_errors, second_own, positives, level, BLOCK: tl.constexpr
):
    """Add one level of the demotion by the better positives below; after the last level, subtract the sorting error.

    ``label_bounds`` is the last rank by label among equal labels. H(s_i - s_k) is 1 below the lowest cut.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < positives
    bound = tl.load(label_bounds + row, mask=inside, other=0)
    start = (bound >> (level + 1)) << (level + 1)
    goes_right = ((bound >> level) & 1) > 0
    _, low = _descend(cuts, lefts, row, inside, start, goes_right, level, positives, 0)
    _, middle = _descend(cuts, lefts, row, inside, start, goes_right, level, positives, 1)
    _, high = _descend(cuts, lefts, row, inside, start, goes_right, level, positives, 2)
    first = tl.minimum(start + (1 << level), positives)
    adds = inside & (goes_right == 0)
    offset = tl.load(offsets + row, mask=adds, other=0.0)
    at_low = tl.load(sums + low, mask=adds, other=0.0)
    at_high = tl.load(sums + high, mask=adds, other=0.0)
    products = sums + positives + 1
    demotion = at_low - tl.load(sums + first, mask=adds, other=0.0)
    demotion += (1 - offset) * (at_high - at_low) - (at_high - tl.load(sums + middle, mask=adds, other=0.0))
    demotion -= tl.load(products + high, mask=adds, other=0.0) - tl.load(products + low, mask=adds, other=0.0)
    demotion += tl.load(second_own + row, mask=inside, other=0.0)
    if level == 0:
        demotion -= tl.load(sorting_errors + row, mask=inside, other=0.0)
    tl.store(second_own + row, demotion, mask=inside)


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
