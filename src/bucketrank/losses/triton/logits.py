"""The two Triton kernels that pass over all logits: one fills the buckets, the other writes the gradient.

Each reads a logit and its target once. A bucket is the interval between two neighbouring edges of a ranking; a negative
below the lowest edge of its ranking belongs to none and costs nothing more.
"""

import triton
import triton.language as tl

from bucketrank.losses.triton.device import (
    clamp_to_unit,
    compute_type,
    edges_of,
    entries_of_program,
    float64_from,
    last_edge_at_or_below,
    ramp,
    split_float64,
)


@triton.jit
def offset_in_bucket(x, owners, scores, edge, relevant, delta_bits, WIDE: tl.constexpr):
    """Return the distance of ``x`` from an edge at or below it in units of 2 delta, cut to 1."""
    delta = float64_from(delta_bits)
    delta_high, delta_low = split_float64(delta, WIDE)
    owner = tl.load(owners + edge, mask=relevant, other=0)
    is_lower = owner >= 0
    score = tl.load(scores + tl.where(is_lower, owner, ~owner), mask=relevant, other=0.0)
    x, score = compute_type(x, WIDE), compute_type(score, WIDE)
    edge_high = tl.where(is_lower, delta_high, -delta_high)
    edge_low = tl.where(is_lower, delta_low, -delta_low)
    return clamp_to_unit(ramp(x, score, edge_high, edge_low, compute_type(0.5 / delta, WIDE)))


@triton.jit
def find_relevant(x, target, inside, bounds, first_edge, edges):
    """Return which entries are negatives at or above the lowest edge."""
    # One number follows the last edge, so that a ranking without edges may read it.
    lowest = tl.where(edges > 0, tl.load(bounds + first_edge), float("inf"))
    return inside & (target == 0) & (x >= lowest)


@triton.jit(do_not_specialize=["rankings", "edges", "copies", "delta_bits"])
def fill_buckets(
    logits,
    targets,
    starts,
    first_positives,
    bounds,
    owners,
    scores,
    buckets,
    broken,
    positive_count,
    size,
    rankings,
    edges,
    copies,
    unit,
    delta_bits,
    SINGLE: tl.constexpr,
    SMOOTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the count and the offsets of the negatives to their buckets; mark rankings with input that is not finite.

    Offsets are added as integers, multiples of 1 / ``unit``: the sum has the same bits in any order of the programs.
    Program p adds to copy p % copies of the buckets, so that few programs meet at one address. With CAPACITY, count
    the positives of all rankings in ``positive_count``.
    """
    ranking, entries, inside = entries_of_program(starts, size, rankings, SINGLE, BLOCK)
    x = tl.load(logits + entries, mask=inside, other=0.0)
    target = tl.load(targets + entries, mask=inside, other=-1.0)
    # A NaN target is not below 0.
    is_finite = (tl.abs(x) < float("inf")) & (tl.abs(target) < float("inf"))
    is_broken = inside & ((target < 0) == 0) & (is_finite == 0)
    if tl.max(is_broken.to(tl.int32), 0) > 0:
        tl.store(broken + ranking, 1)
    if CAPACITY:
        positives = tl.sum((inside & (target > 0)).to(tl.int32), 0)
        if positives > 0:
            tl.atomic_add(positive_count, positives, sem="relaxed")
    _, _, first_edge, ranking_edges = edges_of(first_positives, ranking, 2 if SMOOTH else 1)
    relevant = find_relevant(x, target, inside, bounds, first_edge, ranking_edges) & is_finite
    if tl.max(relevant.to(tl.int32), 0) > 0:
        edge = first_edge + last_edge_at_or_below(bounds, first_edge, ranking_edges, x, relevant)
        copy = tl.program_id(0) % copies
        address = buckets + 2 * (copy.to(tl.int64) * edges + edge)
        tl.atomic_add(address, tl.full((BLOCK,), 1, tl.int64), mask=relevant, sem="relaxed")
        if SMOOTH:
            offset = offset_in_bucket(x, owners, scores, edge, relevant, delta_bits, WIDE)
            offset = tl.where(relevant, offset, 0.0)
            tl.atomic_add(address + 1, (offset * unit).to(tl.int64), mask=relevant, sem="relaxed")


@triton.jit(do_not_specialize=["rankings", "first_stride", "delta_bits"])
def write_gradient(
    logits,
    targets,
    starts,
    first_positives,
    bounds,
    owners,
    scores,
    table,
    broken,
    upstream,
    gradient,
    size,
    rankings,
    first_stride,
    delta_bits,
    SINGLE: tl.constexpr,
    SMOOTH: tl.constexpr,
    TRAINED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient at negatives, from the table of lines; 0 at other entries; NaN where the ranking is broken.

    ``upstream`` is the gradient at the first values. It is not read unless TRAINED. ``positive_gradients`` writes the
    positives afterwards.
    """
    ranking, entries, inside = entries_of_program(starts, size, rankings, SINGLE, BLOCK)
    x = tl.load(logits + entries, mask=inside, other=0.0)
    target = tl.load(targets + entries, mask=inside, other=-1.0)
    is_broken = tl.load(broken + ranking)
    result = tl.where(target < 0, tl.zeros_like(x), tl.where(is_broken > 0, float("nan"), 0.0))
    if TRAINED:
        _, positives, first_edge, edges = edges_of(first_positives, ranking, 2 if SMOOTH else 1)
        relevant = find_relevant(x, target, inside, bounds, first_edge, edges)
        if tl.max(relevant.to(tl.int32), 0) > is_broken:
            edge = first_edge + last_edge_at_or_below(bounds, first_edge, edges, x, relevant)
            scale = tl.load(upstream + ranking.to(tl.int64) * first_stride).to(tl.float64) / tl.maximum(positives, 1)
            value = tl.load(table + 2 * edge, mask=relevant, other=0.0)
            if SMOOTH:
                slope = tl.load(table + 2 * edge + 1, mask=relevant, other=0.0)
                offset = offset_in_bucket(x, owners, scores, edge, relevant, delta_bits, WIDE)
                value += (slope * offset).to(value.dtype)
            result = tl.where(relevant, scale.to(value.dtype) * value, result)
    tl.store(gradient + entries, result, mask=inside)


@triton.jit(do_not_specialize=["positives", "rankings", "first_stride", "second_stride", "localisations"])
def positive_gradients(
    ranking_of,
    first_positives,
    entries,
    slots,
    last_tied,
    broken,
    own,
    second_own,
    first_upstream,
    second_upstream,
    gradient,
    localisation_gradient,
    positives,
    rankings,
    first_stride,
    second_stride,
    localisations,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    LOCALISED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients at the positives, and at the localisation errors if LOCALISED.

    FIRST and SECOND say which gradients at the values exist. For aLRP ``second_own`` holds the factors of the
    localisation errors, added up over the positives: a positive takes the sum at the last positive tied with it.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < positives
    ranking = tl.load(ranking_of + row, mask=inside, other=rankings)
    real = ranking < rankings
    is_broken = tl.load(broken + ranking, mask=real, other=0) > 0
    first = tl.load(first_positives + ranking, mask=real, other=0)
    count = tl.load(first_positives + ranking + 1, mask=real, other=1) - first
    result = tl.zeros((BLOCK,), tl.float64)
    if FIRST:
        scale = tl.load(first_upstream + ranking.to(tl.int64) * first_stride, mask=real, other=0.0).to(tl.float64)
        result += scale / count * tl.load(own + row, mask=real, other=0.0)
    if SECOND:
        scale = tl.load(second_upstream + ranking.to(tl.int64) * second_stride, mask=real, other=0.0).to(tl.float64)
        if LOCALISED:
            tied = tl.load(last_tied + row, mask=real, other=0)
            factor = scale / count * tl.load(second_own + tied, mask=real, other=0.0)
            factor = tl.where(is_broken, float("nan"), factor)
            slot = tl.load(slots + row, mask=inside, other=0)
            tl.store(localisation_gradient + slot, tl.where(real, factor, 0.0), mask=inside & (slot < localisations))
        else:
            result += scale / count * tl.load(second_own + row, mask=real, other=0.0)
    entry = tl.load(entries + row, mask=real, other=0)
    tl.store(gradient + entry, result, mask=real & (is_broken == 0))
