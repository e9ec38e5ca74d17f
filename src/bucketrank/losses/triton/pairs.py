"""Triton kernels that compare the positives of a ranking with each other, tile by tile, without a P x P matrix.

One program compares a tile of rows with all columns. The time grows with P squared: see ``docs/gpu.md``.
"""

import triton
import triton.language as tl

from bucketrank.losses.triton.device import (
    block_of_ranking,
    clamp_to_unit,
    compute_type,
    count_within,
    edges_of,
    float64_from,
    ramp,
    split_float64,
)


@triton.jit
def compare(above, below, delta_high, delta_low, inverse, SMOOTH: tl.constexpr):
    """Return H(above - below), for a column of ``below`` and a row of ``above``, or the reverse."""
    if SMOOTH:
        h = clamp_to_unit(ramp(above, below, delta_high, delta_low, inverse))
    else:
        h = (above >= below).to(above.dtype)
    return h


@triton.jit(do_not_specialize=["rankings", "edges", "copies", "delta_bits"])
def compare_positives(
    first_positives,
    scores,
    labels,
    errors,
    buckets,
    ranks,
    shares,
    seconds,
    rankings,
    edges,
    copies,
    delta_bits,
    LOSS: tl.constexpr,
    SMOOTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compare each positive with those of its ranking; also add up the copies of the buckets of its edges.

    Writes to ``ranks`` the sum of H over the positives. RS: ``shares`` is the sorting error per unit of missorted mass,
    ``seconds`` the sorting error. aLRP: ``shares`` is the sum of H times the errors of the other positives, ``seconds``
    the sum of the errors of the positives at or above. Sums are taken in the type of the ramps inside a tile, in
    float64 between tiles; no term of a sum is negative unless an error is.
    """
    ranking, block = block_of_ranking(first_positives, rankings, tl.program_id(0), ROWS)
    first, positives, first_edge, ranking_edges = edges_of(first_positives, ranking, 2 if SMOOTH else 1)
    if block * ROWS < positives:
        _add_copies(buckets, first_edge, ranking_edges, block, edges, copies, ROWS * (2 if SMOOTH else 1))
        end = first + positives
        row = first + block * ROWS + tl.arange(0, ROWS)
        inside = row < end
        score = compute_type(tl.load(scores + row, mask=inside, other=0.0), WIDE)
        label = compute_type(tl.load(labels + row, mask=inside, other=0.0), WIDE)
        delta = float64_from(delta_bits)
        delta_high, delta_low = split_float64(delta, WIDE)
        inverse = compute_type(0.5 / delta, WIDE) if SMOOTH else 0.0
        # Below the first column H is 0 for all rows.
        lowest = tl.load(scores + first + block * ROWS).to(tl.float64)
        highest = tl.load(scores + tl.minimum(first + block * ROWS + ROWS, end) - 1).to(tl.float64)
        column = first + count_within(scores, first, positives, positives, lowest, -delta, INCLUDE=False)
        # From here on H is 1 for all rows. Only RS compares labels there.
        saturated = first + count_within(scores, first, positives, positives, highest, delta, INCLUDE=not SMOOTH)
        last = end if LOSS == "rs" else saturated
        count = tl.zeros((ROWS,), tl.float64)
        weighted = tl.zeros((ROWS,), tl.float64)
        worse_count = tl.zeros((ROWS,), tl.float64)
        at_or_above = tl.zeros((ROWS,), tl.float64)
        while column < last:
            other = column + tl.arange(0, COLUMNS)
            present = (inside[:, None]) & (other < last)[None, :]
            other_score = compute_type(tl.load(scores + other, mask=other < last, other=0.0), WIDE)
            h = compare(other_score[None, :], score[:, None], delta_high, delta_low, inverse, SMOOTH)
            h = tl.where(present, h, 0.0)
            if LOSS == "rs":
                other_label = compute_type(tl.load(labels + other, mask=other < last, other=0.0), WIDE)
                difference = label[:, None] - other_label[None, :]
                worse = tl.where(difference > 0, h, 0.0)
                better = tl.where(difference > 0, 0.0, h)
                worse_count += tl.sum(worse, 1).to(tl.float64)
                weighted += tl.sum(worse * difference, 1).to(tl.float64)
                count += tl.sum(better, 1).to(tl.float64)
                at_or_above -= tl.sum(better * difference, 1).to(tl.float64)
            else:
                count += tl.sum(h, 1).to(tl.float64)
            if LOSS == "alrp":
                error = compute_type(tl.load(errors + other, mask=other < last, other=0.0), WIDE)[None, :]
                h = tl.where(row[:, None] == other[None, :], 0.0, h)
                weighted += tl.sum(h * error, 1).to(tl.float64)
                reached = present & (other_score[None, :] >= score[:, None])
                at_or_above += tl.sum(tl.where(reached, error, 0.0), 1).to(tl.float64)
            column += COLUMNS
        if LOSS == "rs":
            # The mean label of the others minus the mean label of the worse: a sum of two terms, neither negative.
            excess = weighted / tl.where(worse_count > 0, worse_count, 1.0) + at_or_above / tl.where(inside, count, 1.0)
            share = tl.where(worse_count > 0, excess / tl.where(inside, count + worse_count, 1.0), 0.0)
            tl.store(shares + row, share, mask=inside)
            tl.store(seconds + row, share * worse_count, mask=inside)
            count += worse_count
        else:
            count += (end - saturated).to(tl.float64)
        if LOSS == "alrp":
            rest = tl.zeros((COLUMNS,), tl.float64)
            column = saturated
            while column < end:
                other = column + tl.arange(0, COLUMNS)
                rest += tl.load(errors + other, mask=other < end, other=0.0)
                column += COLUMNS
            tl.store(shares + row, weighted + tl.sum(rest, 0), mask=inside)
            tl.store(seconds + row, at_or_above + tl.sum(rest, 0), mask=inside)
        tl.store(ranks + row, count, mask=inside)


@triton.jit
def _add_copies(buckets, first_edge, ranking_edges, block, edges, copies, TILE: tl.constexpr):
    """Add the copies of one tile of buckets, count and total, into the first copy."""
    edge = block * TILE + tl.arange(0, TILE)
    inside = edge < ranking_edges
    address = buckets + 2 * (first_edge + edge).to(tl.int64)
    count = tl.load(address, mask=inside, other=0)
    total = tl.load(address + 1, mask=inside, other=0)
    copy = 1
    while copy < copies:
        address += 2 * edges
        count += tl.load(address, mask=inside, other=0)
        total += tl.load(address + 1, mask=inside, other=0)
        copy += 1
    address = buckets + 2 * (first_edge + edge).to(tl.int64)
    tl.store(address, count, mask=inside)
    tl.store(address + 1, total, mask=inside)


@triton.jit(do_not_specialize=["rankings", "delta_bits"])
def demote_positives(
    first_positives,
    scores,
    labels,
    shares,
    sorting_errors,
    second_own,
    rankings,
    delta_bits,
    SMOOTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the gradient of the sorting error at each positive: its demotion by the better ones below, minus its error.

    The demotion of positive i is the sum over k with a higher label of H(s_i - s_k) shares_k.
    """
    ranking, block = block_of_ranking(first_positives, rankings, tl.program_id(0), ROWS)
    first, positives, _, _ = edges_of(first_positives, ranking, 1)
    if block * ROWS < positives:
        end = first + positives
        row = first + block * ROWS + tl.arange(0, ROWS)
        inside = row < end
        score = compute_type(tl.load(scores + row, mask=inside, other=0.0), WIDE)
        label = tl.load(labels + row, mask=inside, other=0.0)
        delta = float64_from(delta_bits)
        delta_high, delta_low = split_float64(delta, WIDE)
        inverse = compute_type(0.5 / delta, WIDE) if SMOOTH else 0.0
        # From the last column on H is 0 for all rows.
        highest = tl.load(scores + tl.minimum(first + block * ROWS + ROWS, end) - 1).to(tl.float64)
        last = first + count_within(scores, first, positives, positives, highest, delta, INCLUDE=True)
        demotion = tl.zeros((ROWS,), tl.float64)
        column = first
        while column < last:
            other = column + tl.arange(0, COLUMNS)
            other_score = compute_type(tl.load(scores + other, mask=other < last, other=0.0), WIDE)
            other_label = tl.load(labels + other, mask=other < last, other=0.0)
            share = compute_type(tl.load(shares + other, mask=other < last, other=0.0), WIDE)
            h = compare(score[:, None], other_score[None, :], delta_high, delta_low, inverse, SMOOTH)
            h = tl.where(other_label[None, :] > label[:, None], h, 0.0)
            demotion += tl.sum(h * share[None, :], 1).to(tl.float64)
            column += COLUMNS
        sorting_error = tl.load(sorting_errors + row, mask=inside, other=0.0)
        tl.store(second_own + row, demotion - sorting_error, mask=inside)
