"""Triton kernels over the positives: their order, their edges, and the comparison of positives with each other.

Positives are numbered by ranking, then by score, lowest first. An edge belongs to a positive: i is the owner of the
lower edge ``s_i - delta``, ~i of the upper edge ``s_i + delta``. At delta 0 the only edge of a positive is its score.
"""

import triton
import triton.language as tl

from bucketrank.losses.triton_backend.device_functions import (
    block_of_ranking,
    clamp_to_unit,
    compute_type,
    count_within,
    edges_of,
    float64_from,
    ramp,
    split_float64,
)


@triton.jit(do_not_specialize=["positives", "rankings"])
def write_keys(
    logits,
    starts,
    index,
    order,
    keys,
    positives,
    rankings,
    SINGLE: tl.constexpr,
    CONTENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write integers that sort the positives.

    CONTENT is "both" (ranking and float32 score in one key), "score", or "ranking" in the order of ``order``.
    An index of -1 is padding: its ranking comes after all others.
    """
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < positives
    source = lanes.to(tl.int64)
    if CONTENT == "ranking":
        source = tl.load(order + lanes, mask=inside, other=0)
    entry = tl.load(index + source, mask=inside, other=-1)
    real = inside & (entry >= 0)
    if CONTENT == "score":
        score = tl.load(logits + entry, mask=real, other=0.0)
        bits = score.to(tl.int64, bitcast=True)
        # Negative floats have descending bits: flip them all but the sign.
        key = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        key = tl.zeros_like(entry)
        if not SINGLE:
            low = tl.zeros_like(lanes)
            high = low + rankings
            steps = rankings + 0
            while steps > 0:
                middle = (low + high) // 2
                searching = high - low > 1
                after = tl.load(starts + middle, mask=searching, other=0) <= entry
                low = tl.where(searching & after, middle, low)
                high = tl.where(searching & (after == 0), middle, high)
                steps = steps // 2
            key = low.to(tl.int64)
        key = tl.where(real, key, rankings)
        if CONTENT == "both":
            score = tl.load(logits + entry, mask=real, other=0.0)
            bits = score.to(tl.int32, bitcast=True)
            ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
            key = key * 0x100000000 + tl.where(real, ascending, 0)
    tl.store(keys + lanes, key, mask=inside)


@triton.jit(do_not_specialize=["positives", "rankings", "localisations"])
def gather_positives(
    logits,
    targets,
    localisation,
    index,
    order,
    earlier_order,
    keys,
    scores,
    labels,
    errors,
    entries,
    slots,
    ranking_of,
    first_positives,
    positives,
    rankings,
    localisations,
    TWO_ORDERS: tl.constexpr,
    LOCALISED: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the positives in their order; the last programs write the first positive of each ranking.

    ``keys >> SHIFT`` is the ranking of each positive. ``slots`` are positions in the order of the logits.
    """
    program = tl.program_id(0)
    programs = (positives + BLOCK - 1) // BLOCK
    lanes = tl.arange(0, BLOCK)
    if program < programs:
        row = program * BLOCK + lanes
        inside = row < positives
        slot = tl.load(order + row, mask=inside, other=0)
        if TWO_ORDERS:
            slot = tl.load(earlier_order + slot, mask=inside, other=0)
        entry = tl.load(index + slot, mask=inside, other=-1)
        real = inside & (entry >= 0)
        tl.store(scores + row, tl.load(logits + entry, mask=real, other=0.0), mask=inside)
        tl.store(labels + row, tl.load(targets + entry, mask=real, other=0.0), mask=inside)
        if LOCALISED:
            error = tl.load(localisation + slot, mask=real & (slot < localisations), other=0.0)
            tl.store(errors + row, error.to(tl.float64), mask=inside)
        tl.store(entries + row, entry, mask=inside)
        tl.store(slots + row, slot.to(tl.int32), mask=inside)
        ranking = (tl.load(keys + row, mask=inside, other=0) >> SHIFT).to(tl.int32)
        tl.store(ranking_of + row, ranking, mask=inside)
    else:
        ranking = (program - programs) * BLOCK + lanes
        low = tl.zeros_like(ranking)
        high = low + positives
        steps = positives + 0
        while steps > 0:
            middle = (low + high) // 2
            searching = low < high
            before = (tl.load(keys + middle, mask=searching, other=0) >> SHIFT) < ranking
            low = tl.where(searching & before, middle + 1, low)
            high = tl.where(searching & (before == 0), middle, high)
            steps = steps // 2
        tl.store(first_positives + ranking, low, mask=ranking <= rankings)


@triton.jit
def next_float(x, UP: tl.constexpr):
    """Return the float next to ``x``: above it if UP is 1, below it if UP is -1."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        step = tl.full(x.shape, UP, tl.int64)
        # The neighbours of 0 are the smallest numbers of either sign.
        zero = step if UP > 0 else step - 0x7FFFFFFFFFFFFFFE
    else:
        bits = x.to(tl.int32, bitcast=True)
        step = tl.full(x.shape, UP, tl.int32)
        zero = step if UP > 0 else step - 0x7FFFFFFE
    bits = tl.where(x == 0, zero, tl.where(x > 0, bits + step, bits - step))
    return bits.to(x.dtype, bitcast=True)


@triton.jit
def bound_of_edge(score, delta, SIGN: tl.constexpr, dtype: tl.constexpr):
    """Return the lowest number x of ``dtype`` for which x - score >= SIGN * delta.

    With it a logit is compared in its own type, as if the edge were exact.
    """
    edge = score + SIGN * delta
    bound = edge.to(dtype)
    if dtype == tl.float64:
        below = next_float(bound, -1)
        bound = tl.where((below - score) >= SIGN * delta, below, bound)
        bound = tl.where((bound - score) < SIGN * delta, next_float(bound, 1), bound)
    else:
        bound = tl.where(bound.to(tl.float64) < edge, next_float(bound, 1), bound)
        if SIGN > 0:
            # A delta below the digits of the score: the bound is the next number.
            own = score.to(dtype)
            bound = tl.where(bound > own, bound, next_float(own, 1))
    return bound


@triton.jit(do_not_specialize=["positives", "rankings", "delta_bits"])
def place_edges(
    scores,
    ranking_of,
    first_positives,
    bounds,
    owners,
    lower_edges,
    upper_edges,
    last_tied,
    positives,
    rankings,
    delta_bits,
    SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the edges of each ranking in ascending order, where the edges of each positive are, and its last tie."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ranking = tl.load(ranking_of + row, mask=row < positives, other=rankings)
    real = ranking < rankings
    first = tl.load(first_positives + ranking, mask=real, other=0)
    count = tl.load(first_positives + ranking + 1, mask=real, other=0) - first
    most = tl.max(count, 0)
    score = tl.load(scores + row, mask=real, other=0.0)
    precise = score.to(tl.float64)
    tied_or_below = count_within(scores, first, count, most, precise, 0.0, True)
    tl.store(last_tied + row, first + tied_or_below - 1, mask=real)
    if SMOOTH:
        delta = float64_from(delta_bits)
        # An upper edge k precedes a lower edge i if s_i - s_k > 2 delta. Both searches test it with the same numbers.
        lower = first + row + _uppers_before(scores, first, count, most, precise, delta)
        upper = first + row + count_within(scores, first, count, most, precise, 2 * delta, True)
        tl.store(bounds + lower, bound_of_edge(precise, delta, -1, score.dtype), mask=real)
        tl.store(bounds + upper, bound_of_edge(precise, delta, 1, score.dtype), mask=real)
        tl.store(owners + lower, row, mask=real)
        tl.store(owners + upper, ~row, mask=real)
        tl.store(lower_edges + row, lower, mask=real)
        tl.store(upper_edges + row, upper, mask=real)
    else:
        tl.store(bounds + row, score, mask=real)
        tl.store(owners + row, row, mask=real)
        below = count_within(scores, first, count, most, precise, 0.0, False)
        tl.store(lower_edges + row, first + below, mask=real)


@triton.jit
def _uppers_before(scores, first, count, most, score, delta):
    """Return how many of the ascending scores lie more than 2 delta below ``score``."""
    low = first
    high = first + count
    steps = most
    while steps > 0:
        middle = (low + high) // 2
        searching = low < high
        before = score - tl.load(scores + middle, mask=searching, other=0.0).to(tl.float64) > 2 * delta
        low = tl.where(searching & before, middle + 1, low)
        high = tl.where(searching & (before == 0), middle, high)
        steps = steps // 2
    return low - first


@triton.jit
def compare(above, below, delta_high, delta_low, inverse, SMOOTH: tl.constexpr):
    """Return H(above - below), for a column of ``below`` and a row of ``above``, or the reverse."""
    if SMOOTH:
        return clamp_to_unit(ramp(above, below, delta_high, delta_low, inverse))
    return (above >= below).to(above.dtype)


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
        column = first + count_within(scores, first, positives, positives, lowest, -delta, False)
        # From here on H is 1 for all rows. Only RS compares labels there.
        saturated = first + count_within(scores, first, positives, positives, highest, delta, not SMOOTH)
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
        last = first + count_within(scores, first, positives, positives, highest, delta, True)
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
