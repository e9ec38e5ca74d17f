"""Triton kernels over the positives: their order and their edges.

Positives are numbered by ranking, then by score, lowest first. An edge belongs to a positive: i is the owner of the
lower edge ``s_i - delta``, ~i of the upper edge ``s_i + delta``. At delta 0 the only edge of a positive is its score.
"""

import triton
import triton.language as tl

from bucketrank.losses.triton.device import count_within, float64_from


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
    tied_or_below = count_within(scores, first, count, most, precise, 0.0, INCLUDE=True)
    tl.store(last_tied + row, first + tied_or_below - 1, mask=real)
    if SMOOTH:
        delta = float64_from(delta_bits)
        # An upper edge k precedes a lower edge i if s_i - s_k > 2 delta. Both searches test it with the same numbers.
        lower = first + row + _uppers_before(scores, first, count, most, precise, delta)
        upper = first + row + count_within(scores, first, count, most, precise, 2 * delta, INCLUDE=True)
        tl.store(bounds + lower, bound_of_edge(precise, delta, -1, score.dtype), mask=real)
        tl.store(bounds + upper, bound_of_edge(precise, delta, 1, score.dtype), mask=real)
        tl.store(owners + lower, row, mask=real)
        tl.store(owners + upper, ~row, mask=real)
        tl.store(lower_edges + row, lower, mask=real)
        tl.store(upper_edges + row, upper, mask=real)
    else:
        tl.store(bounds + row, score, mask=real)
        tl.store(owners + row, row, mask=real)
        below = count_within(scores, first, count, most, precise, 0.0, INCLUDE=False)
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
