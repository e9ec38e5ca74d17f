"""Triton kernels over the positives: their order and their edges.

Positives are numbered by ranking, then by score, lowest first; this number is the *row* of a positive. Its *slot* is
its number in the order of the logits. An edge belongs to a positive: i is the owner of the lower edge ``s_i - delta``,
~i of the upper edge ``s_i + delta``. At delta 0 the only edge of a positive is its score.
"""

import triton
import triton.language as tl

from bucketrank.losses.triton.device import LARGEST_FLOAT32, exact_sum, float64_from


@triton.jit
def _finite(score):
    """Return ``score``, or a large number if it is NaN or infinite.

    The pass over the logits marks its ranking as broken, but the searches still need ordered scores.
    """
    return tl.where(tl.abs(score) < float("inf"), score, tl.where(score < 0, -LARGEST_FLOAT32, LARGEST_FLOAT32))


@triton.jit
def _ascending(bits):
    """Return the bits of a float as an integer of the same order; applied twice, the bits again."""
    # Negative floats have descending bits: flip them all but the sign.
    if bits.dtype == tl.int64:
        flipped = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped


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
        score = _finite(tl.load(logits + entry, mask=real, other=0.0))
        key = _ascending(score.to(tl.int64, bitcast=True))
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
            score = _finite(tl.load(logits + entry, mask=real, other=0.0).to(tl.float32))
            low_half = _ascending(score.to(tl.int32, bitcast=True)).to(tl.int64) + 0x80000000
            key = key * 0x100000000 + tl.where(real, low_half, 0)
    tl.store(keys + lanes, key, mask=inside)


@triton.jit
def _scores_at(row, mask, logits, index, order, earlier_order, keys, TWO_ORDERS: tl.constexpr):
    """Return the scores of rows: from their keys, or with TWO_ORDERS, where keys do not hold them, from the logits."""
    if TWO_ORDERS:
        slot = tl.load(earlier_order + tl.load(order + row, mask=mask, other=0), mask=mask, other=0)
        score = _finite(tl.load(logits + tl.load(index + slot, mask=mask, other=0), mask=mask, other=0.0))
    else:
        low_half = tl.load(keys + row, mask=mask, other=0) & 0xFFFFFFFF
        bits = _ascending((low_half - 0x80000000).to(tl.int32))
        score = bits.to(tl.float32, bitcast=True)
    return score


@triton.jit
def _count(
    first,
    count,
    limit,
    gap,
    mask,
    logits,
    index,
    order,
    earlier_order,
    keys,
    TWO_ORDERS: tl.constexpr,
    INCLUDE: tl.constexpr,
):
    """Return how many scores of each ranking lie at most ``gap`` above ``limit``; strictly less if not INCLUDE."""
    low = first
    high = first + count
    steps = tl.max(tl.where(mask, count, 0), 0)
    while steps > 0:
        middle = (low + high) // 2
        searching = mask & (low < high)
        score = _scores_at(middle, searching, logits, index, order, earlier_order, keys, TWO_ORDERS)
        difference = score.to(tl.float64) - limit
        if INCLUDE:
            within = difference <= gap
        else:
            within = difference < gap
        low = tl.where(searching & within, middle + 1, low)
        high = tl.where(searching & (within == 0), middle, high)
        steps = steps // 2
    return low - first


@triton.jit
def _rows_before(keys, positives, ranking, SHIFT: tl.constexpr):
    """Return how many positives belong to an earlier ranking."""
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
    return low


@triton.jit
def _next_float_up(x):
    """Return the smallest float above ``x``."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        one = tl.full(x.shape, 1, tl.int64)
    else:
        bits = x.to(tl.int32, bitcast=True)
        one = tl.full(x.shape, 1, tl.int32)
    bits = tl.where(x == 0, one, tl.where(x > 0, bits + one, bits - one))
    return bits.to(x.dtype, bitcast=True)


@triton.jit
def _store_edge(bounds, rests, position, score, signed_delta, mask):
    """Store an edge as its bound, the lowest float at or above it, and the rest, how far the bound lies above it.

    A logit is at or above the edge if it is at least the bound, a comparison in its own type.
    """
    total, error = exact_sum(score, signed_delta)
    bound = total.to(bounds.dtype.element_ty)
    bound = tl.where((bound.to(tl.float64) - total) - error < 0, _next_float_up(bound), bound)
    rest = (bound.to(tl.float64) - total) - error
    tl.store(bounds + position, bound, mask=mask)
    tl.store(rests + position, rest, mask=mask)


@triton.jit(do_not_specialize=["positives", "rankings", "localisations", "delta_bits"])
def place_positives(
    logits,
    targets,
    localisation,
    starts,
    index,
    order,
    earlier_order,
    keys,
    scores,
    labels,
    errors,
    rows,
    block_slots,
    first_positives,
    bounds,
    rests,
    owners,
    lower_edges,
    upper_edges,
    last_tied,
    positives,
    rankings,
    localisations,
    delta_bits,
    SINGLE: tl.constexpr,
    TWO_ORDERS: tl.constexpr,
    LOCALISED: tl.constexpr,
    SMOOTH: tl.constexpr,
    LOGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the positives in their order, and place their edges; the last programs write where each ranking begins.

    The upper half of a key is the ranking of a positive; with TWO_ORDERS the whole key is. Of each block of LOGITS
    logits, ``block_slots`` gets the slot of the first positive. The backward pass finds its positives there.
    """
    SHIFT: tl.constexpr = 0 if TWO_ORDERS else 32
    program = tl.program_id(0)
    programs = (positives + BLOCK - 1) // BLOCK
    lanes = tl.arange(0, BLOCK)
    if program < programs:
        row = program * BLOCK + lanes
        inside = row < positives
        ranking = (tl.load(keys + row, mask=inside, other=0) >> SHIFT).to(tl.int32)
        real = inside & (ranking < rankings)
        slot = tl.load(order + row, mask=real, other=0)
        if TWO_ORDERS:
            slot = tl.load(earlier_order + slot, mask=real, other=0)
        entry = tl.load(index + slot, mask=real, other=0)
        score = _scores_at(row, real, logits, index, order, earlier_order, keys, TWO_ORDERS)
        tl.store(scores + row, score, mask=inside)
        tl.store(labels + row, tl.load(targets + entry, mask=real, other=0.0).to(labels.dtype.element_ty), mask=inside)
        tl.store(rows + slot, row, mask=real)
        if LOCALISED:
            error = tl.load(localisation + slot, mask=real & (slot < localisations), other=0.0)
            tl.store(errors + row, error.to(tl.float64), mask=inside)
        start = tl.zeros_like(entry)
        if not SINGLE:
            start = tl.load(starts + ranking, mask=real, other=0)
        block = (entry - start) // LOGITS
        previous = tl.load(index + slot - 1, mask=real & (slot > 0), other=-1)
        tl.store(
            block_slots + start // LOGITS + ranking + block,
            slot.to(tl.int32),
            mask=real & (previous < start + block * LOGITS),
        )
        first = _rows_before(keys, positives, ranking, SHIFT)
        count = _rows_before(keys, positives, ranking + 1, SHIFT) - first
        precise = score.to(tl.float64)
        delta = float64_from(delta_bits)
        if LOCALISED:
            tied = _count(
                first, count, precise, 0.0, real, logits, index, order, earlier_order, keys, TWO_ORDERS, INCLUDE=True
            )
            tl.store(last_tied + row, first + tied - 1, mask=real)
        if SMOOTH:
            # The upper edge of k precedes the lower edge of i if s_i - s_k > 2 delta: both searches ask for this.
            gap = 2 * delta
            lower = _count(
                first, count, precise, -gap, real, logits, index, order, earlier_order, keys, TWO_ORDERS, INCLUDE=False
            )
            upper = _count(
                first, count, precise, gap, real, logits, index, order, earlier_order, keys, TWO_ORDERS, INCLUDE=True
            )
            lower += first + row
            upper += first + row
            _store_edge(bounds, rests, lower, precise, -delta, real)
            _store_edge(bounds, rests, upper, precise, delta, real)
            tl.store(owners + lower, row, mask=real)
            tl.store(owners + upper, ~row, mask=real)
            tl.store(lower_edges + row, lower, mask=real)
            tl.store(upper_edges + row, upper, mask=real)
        else:
            tl.store(bounds + row, score, mask=real)
            tl.store(owners + row, row, mask=real)
            below = _count(
                first, count, precise, 0.0, real, logits, index, order, earlier_order, keys, TWO_ORDERS, INCLUDE=False
            )
            tl.store(lower_edges + row, first + below, mask=real)
    else:
        ranking = (program - programs) * BLOCK + lanes
        first = _rows_before(keys, positives, ranking, SHIFT)
        tl.store(first_positives + ranking, first, mask=ranking <= rankings)
