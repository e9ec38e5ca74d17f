"""Triton kernels of the tree in ``tree.py``: running sums over one level of it, and steps from a level to the next.

A positive is the row of its ranking and score. The tree re-sorts the rows of each level (``level_order``). There are
three columns of running sums: weights, weights times fractions, and fractions.
"""

import triton
import triton.language as tl

from bucketrank.losses.triton.device import count_copies
from bucketrank.losses.triton.pairs import add_copies


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
