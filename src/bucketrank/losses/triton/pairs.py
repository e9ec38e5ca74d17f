"""Triton kernels that compare the positives of a ranking with each other, tile by tile, without a P x P matrix.

One program compares a tile of rows with all columns. The time grows with P squared: see ``docs/gpu.md``. A thread keeps
the sums of its own pairs in registers, in the ramp type. Only after FLUSH tiles are they added up over the columns, in
float64, so that the inner loops exchange nothing between threads.
"""

import triton
import triton.language as tl

from bucketrank.losses.triton.device import (
    block_of_ranking,
    clamp_to_unit,
    compute_type,
    count_copies,
    count_within,
    edges_of,
    float64_from,
    split_sum,
)


@triton.jit
def _total(sums):
    """Return the sum of each row in float64."""
    return tl.sum(sums, 1).to(tl.float64)


@triton.jit
def add_copies(buckets, first_edge, ranking_edges, block, edges, copies, TILE: tl.constexpr):
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
    tl.debug_barrier()  # if a tile has fewer buckets than threads, several threads have loaded the same bucket
    tl.store(address, count, mask=inside)
    tl.store(address + 1, total, mask=inside)


@triton.jit(do_not_specialize=["rankings", "delta_bits", "inverse_bits"])
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
    delta_bits,
    inverse_bits,
    LOSS: tl.constexpr,
    SMOOTH: tl.constexpr,
    WIDE: tl.constexpr,
    COPIES: tl.constexpr,
    BUCKETS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLUSH: tl.constexpr,
):
    """Compare each positive with those of its ranking; also add up the bucket copies of its edges.

    Writes to ``ranks`` the sum of H over the positives. RS: ``shares`` is the sorting error per unit of missorted mass,
    ``seconds`` the sorting error. aLRP: ``shares`` is the sum of H times the errors of the other positives, ``seconds``
    the sum of errors over the positives at or above. No term of a sum is negative unless an error is.
    """
    PER_POSITIVE: tl.constexpr = 2 if SMOOTH else 1
    ranking, block = block_of_ranking(first_positives, rankings, tl.program_id(0), ROWS)
    first, positives, first_edge, ranking_edges = edges_of(first_positives, ranking, PER_POSITIVE)
    if block * ROWS < positives:
        edges, copies = count_copies(first_positives, rankings, PER_POSITIVE, COPIES, BUCKETS)
        add_copies(buckets, first_edge, ranking_edges, block, edges, copies, ROWS * PER_POSITIVE)
        end = first + positives
        row = first + block * ROWS + tl.arange(0, ROWS)
        inside = row < end
        delta = float64_from(delta_bits)
        inverse = compute_type(float64_from(inverse_bits), WIDE)
        score = tl.load(scores + row, mask=inside, other=0.0)
        label = compute_type(tl.load(labels + row, mask=inside, other=0.0), WIDE)[:, None]
        # H(x - score) is (x - edge) / (2 delta), clamped: 0 at the lower edge of the row.
        edge, rest = split_sum(score.to(tl.float64), -delta, WIDE)
        edge, rest = edge[:, None], rest[:, None]
        score = compute_type(score, WIDE)[:, None]
        # Below the first column H is 0 for all rows; from ``saturated`` on it is 1. Only RS compares labels there.
        lowest = tl.load(scores + first + block * ROWS).to(tl.float64)
        highest = tl.load(scores + tl.minimum(first + block * ROWS + ROWS, end) - 1).to(tl.float64)
        column = first + count_within(scores, first, positives, lowest, -delta, INCLUDE=False)
        saturated = first + count_within(scores, first, positives, highest, delta, INCLUDE=not SMOOTH)
        count = tl.zeros((ROWS,), tl.float64)
        weighted = tl.zeros((ROWS,), tl.float64)
        worse_count = tl.zeros((ROWS,), tl.float64)
        at_or_above = tl.zeros((ROWS,), tl.float64)
        zeros = tl.zeros((ROWS, COLUMNS), tl.float64 if WIDE else tl.float32)
        while column < saturated:
            flush = tl.minimum(column + FLUSH * COLUMNS, saturated)
            h_sum = zeros
            weighted_sum = zeros
            worse_sum = zeros
            above_sum = zeros
            while column < flush:
                other = column + tl.arange(0, COLUMNS)
                present = other < flush
                # Beyond the last column H is 0.
                other_score = tl.load(scores + other, mask=present, other=float("-inf"))
                other_score = compute_type(other_score, WIDE)[None, :]
                if SMOOTH:
                    h = clamp_to_unit(((other_score - edge) - rest) * inverse)
                else:
                    h = tl.where(other_score >= score, 1.0, zeros)
                if LOSS == "rs":
                    other_label = compute_type(tl.load(labels + other, mask=present, other=0.0), WIDE)[None, :]
                    difference = label - other_label
                    worse = tl.where(difference > 0, h, 0.0)
                    better = h - worse
                    worse_sum += worse
                    weighted_sum += worse * difference
                    h_sum += better
                    above_sum -= better * difference
                else:
                    h_sum += h
                if LOSS == "alrp":
                    error = compute_type(tl.load(errors + other, mask=present, other=0.0), WIDE)[None, :]
                    weighted_sum += h * error
                    above_sum += tl.where(other_score >= score, error, 0.0)
                column += COLUMNS
            column = flush
            count += _total(h_sum)
            if LOSS == "rs":
                worse_count += _total(worse_sum)
            if LOSS != "ap" and LOSS != "interpolated_ap":
                weighted += _total(weighted_sum)
                at_or_above += _total(above_sum)
        if LOSS == "rs":
            while column < end:
                flush = tl.minimum(column + FLUSH * COLUMNS, end)
                number = (flush - column).to(tl.float64)
                missorted = tl.zeros((ROWS, COLUMNS), tl.int32)
                weighted_sum = zeros
                above_sum = zeros
                while column < flush:
                    other = column + tl.arange(0, COLUMNS)
                    present = other < flush
                    other_label = compute_type(tl.load(labels + other, mask=present, other=0.0), WIDE)[None, :]
                    difference = tl.where(present[None, :], label - other_label, 0.0)
                    missorted += (difference > 0).to(tl.int32)
                    weighted_sum += tl.maximum(difference, 0.0)
                    above_sum -= tl.minimum(difference, 0.0)
                    column += COLUMNS
                column = flush
                missorted_count = tl.sum(missorted, 1).to(tl.float64)
                worse_count += missorted_count
                weighted += _total(weighted_sum)
                count += number - missorted_count
                at_or_above += _total(above_sum)
            # The mean label of the others minus the mean label of the worse: a sum of two terms, neither negative.
            excess = weighted / tl.where(worse_count > 0, worse_count, 1.0) + at_or_above / tl.where(inside, count, 1.0)
            share = tl.where(worse_count > 0, excess / tl.where(inside, count + worse_count, 1.0), 0.0)
            tl.store(shares + row, share, mask=inside)
            tl.store(seconds + row, share * worse_count, mask=inside)
            count += worse_count
        else:
            count += (end - saturated).to(tl.float64)
        if LOSS == "alrp":
            rest_sum = tl.zeros((COLUMNS,), tl.float64)
            column = saturated
            while column < end:
                other = column + tl.arange(0, COLUMNS)
                rest_sum += tl.load(errors + other, mask=other < end, other=0.0)
                column += COLUMNS
            # Only the others count: each row has added its own error as well, rounded and times H(0).
            own_error = compute_type(tl.load(errors + row, mask=inside, other=0.0), WIDE).to(tl.float64)
            weighted -= own_error * (0.5 if SMOOTH else 1.0)
            tl.store(shares + row, weighted + tl.sum(rest_sum, 0), mask=inside)
            tl.store(seconds + row, at_or_above + tl.sum(rest_sum, 0), mask=inside)
        tl.store(ranks + row, count, mask=inside)


@triton.jit(do_not_specialize=["rankings", "delta_bits", "inverse_bits"])
def demote_positives(
    first_positives,
    scores,
    labels,
    shares,
    sorting_errors,
    second_own,
    rankings,
    delta_bits,
    inverse_bits,
    SMOOTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLUSH: tl.constexpr,
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
        delta = float64_from(delta_bits)
        inverse = compute_type(float64_from(inverse_bits), WIDE)
        score = tl.load(scores + row, mask=inside, other=0.0)
        # Rows past the end have no demotion.
        label = tl.load(labels + row, mask=inside, other=float("inf"))[:, None]
        # H(score - x) is (edge - x) / (2 delta), clamped: 0 at the upper edge of the row.
        edge, rest = split_sum(score.to(tl.float64), delta, WIDE)
        edge, rest = edge[:, None], rest[:, None]
        score = compute_type(score, WIDE)[:, None]
        # Below ``ramps`` H is 1 for all rows, from ``last`` on it is 0.
        lowest = tl.load(scores + first + block * ROWS).to(tl.float64)
        highest = tl.load(scores + tl.minimum(first + block * ROWS + ROWS, end) - 1).to(tl.float64)
        ramps = first + count_within(scores, first, positives, lowest, -delta, INCLUDE=not SMOOTH)
        last = first + count_within(scores, first, positives, highest, delta, INCLUDE=True)
        demotion = tl.zeros((ROWS,), tl.float64)
        zeros = tl.zeros((ROWS, COLUMNS), tl.float64 if WIDE else tl.float32)
        column = first
        while column < ramps:
            flush = tl.minimum(column + FLUSH * COLUMNS, ramps)
            sums = zeros
            while column < flush:
                other = column + tl.arange(0, COLUMNS)
                other_label = tl.load(labels + other, mask=other < flush, other=0.0)[None, :]
                share = compute_type(tl.load(shares + other, mask=other < flush, other=0.0), WIDE)[None, :]
                sums += tl.where(other_label > label, share, 0.0)
                column += COLUMNS
            column = flush
            demotion += _total(sums)
        while column < last:
            flush = tl.minimum(column + FLUSH * COLUMNS, last)
            sums = zeros
            while column < flush:
                other = column + tl.arange(0, COLUMNS)
                other_score = compute_type(tl.load(scores + other, mask=other < flush, other=0.0), WIDE)[None, :]
                other_label = tl.load(labels + other, mask=other < flush, other=0.0)[None, :]
                share = compute_type(tl.load(shares + other, mask=other < flush, other=0.0), WIDE)[None, :]
                if SMOOTH:
                    h = clamp_to_unit(((edge - other_score) + rest) * inverse)
                else:
                    h = tl.where(score >= other_score, 1.0, zeros)
                sums += tl.where(other_label > label, h, 0.0) * share
                column += COLUMNS
            column = flush
            demotion += _total(sums)
        sorting_error = tl.load(sorting_errors + row, mask=inside, other=0.0)
        tl.store(second_own + row, demotion - sorting_error, mask=inside)
