"""The two Triton kernels that pass over all logits: one fills the buckets, the other writes the gradient.

A bucket is the interval between two neighbouring edges of a ranking. The forward pass reads each logit and its target,
and writes a byte, the *kind* of the entry. The backward pass reads that byte, and the logit only if its gradient
depends on it: a negative at or above the lowest edge of its ranking is called *relevant*.
"""

import triton
import triton.language as tl

from bucketrank.losses.triton.device import (
    compute_type,
    count_copies,
    divide,
    edges_of,
    entries_of_program,
    float64_from,
    last_edge_at_or_below,
    offset_in_bucket,
)

IGNORED = tl.constexpr(0)
NEGATIVE = tl.constexpr(1)
RELEVANT = tl.constexpr(2)
POSITIVE = tl.constexpr(3)


@triton.jit(do_not_specialize=["size", "rankings", "inverse_bits"])
def fill_buckets(
    logits,
    targets,
    kinds,
    starts,
    first_positives,
    bounds,
    rests,
    buckets,
    broken,
    positive_count,
    size,
    rankings,
    unit,
    inverse_bits,
    SINGLE: tl.constexpr,
    SMOOTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    WIDE: tl.constexpr,
    COPIES: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the count and the offsets of the negatives to their buckets; mark rankings with non-finite input.

    Offsets are added as integers, multiples of 1 / ``unit``: the sum has the same bits in any order of the programs.
    Program p adds to copy p % copies of the buckets, so that few programs meet at one address. With CAPACITY, count
    the positives of all rankings in ``positive_count``.
    """
    PER_POSITIVE: tl.constexpr = 2 if SMOOTH else 1
    ranking, start, number = entries_of_program(starts, size, rankings, SINGLE, BLOCK)
    entries = tl.arange(0, BLOCK)
    inside = entries < number
    dtype = bounds.dtype.element_ty
    x = tl.load(logits + start + entries, mask=inside, other=0.0).to(dtype)
    target = tl.load(targets + start + entries, mask=inside, other=-1.0).to(dtype)
    # A NaN target is not below 0.
    is_finite = (tl.abs(x) < float("inf")) & (tl.abs(target) < float("inf"))
    is_broken = ((target < 0) == 0) & (is_finite == 0)
    if tl.max(is_broken.to(tl.int32), 0) > 0:
        tl.store(broken + ranking, 1)
    if CAPACITY:
        positives = tl.sum((target > 0).to(tl.int32), 0)
        if positives > 0:
            tl.atomic_add(positive_count, positives, sem="relaxed")
    _, positives, first_edge, edges = edges_of(first_positives, ranking, PER_POSITIVE)
    # An extra number follows the last edge, which a ranking without edges may read.
    lowest = tl.where(edges > 0, tl.load(bounds + first_edge), float("inf"))
    relevant = (target == 0) & (x >= lowest) & is_finite
    kind = tl.where(relevant, RELEVANT, tl.where(target > 0, POSITIVE, tl.where(target < 0, IGNORED, NEGATIVE)))
    tl.store(kinds + start + entries, kind.to(tl.int8), mask=inside)
    if tl.max(relevant.to(tl.int32), 0) > 0:
        edge = first_edge + last_edge_at_or_below(bounds, first_edge, edges, x, relevant)
        all_edges, copies = count_copies(first_positives, rankings, PER_POSITIVE, COPIES, BUCKETS)
        copy = buckets + 2 * ((tl.program_id(0) % copies).to(tl.int64) * all_edges)
        offset = tl.zeros((BLOCK,), tl.int64)
        if SMOOTH:
            inverse = compute_type(float64_from(inverse_bits), WIDE)
            offset = (offset_in_bucket(x, bounds, rests, edge, relevant, inverse, WIDE) * unit).to(tl.int64)
        # Early in training, most logits lie in one bucket. Add its members up first: one addition to memory each.
        lowest_edge = tl.min(tl.where(relevant, edge, 0x7FFFFFFF), 0)
        highest_edge = tl.max(tl.where(relevant, edge, -1), 0)
        # If the scores of the positives differ by less than 2 delta, all lower edges come before all upper edges, and
        # the widest bucket lies between them.
        common = tl.where(lowest_edge == highest_edge, lowest_edge, first_edge + positives - 1)
        in_common = relevant & (edge == common)
        members = tl.sum(in_common.to(tl.int32), 0)
        if members > 0:
            tl.atomic_add(copy + 2 * common, members.to(tl.int64), sem="relaxed")
            if SMOOTH:
                tl.atomic_add(copy + 2 * common + 1, tl.sum(tl.where(in_common, offset, 0), 0), sem="relaxed")
        if lowest_edge != highest_edge:
            others = relevant & (edge != common)
            tl.atomic_add(copy + 2 * edge, tl.full((BLOCK,), 1, tl.int64), mask=others, sem="relaxed")
            if SMOOTH:
                tl.atomic_add(copy + 2 * edge + 1, offset, mask=others, sem="relaxed")


@triton.jit(do_not_specialize=["size", "rankings", "localisations", "first_stride", "second_stride", "inverse_bits"])
def write_gradient(
    logits,
    kinds,
    starts,
    first_positives,
    bounds,
    rests,
    table,
    broken,
    index,
    rows,
    block_slots,
    own,
    second_own,
    last_tied,
    first_upstream,
    second_upstream,
    gradient,
    localisation_gradient,
    size,
    rankings,
    localisations,
    first_stride,
    second_stride,
    inverse_bits,
    SINGLE: tl.constexpr,
    SMOOTH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    LOCALISED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIVES: tl.constexpr,
):
    """Write the gradient at the logits, and at the localisation errors if LOCALISED.

    Negatives take it from the table of lines, positives from their own gradients, POSITIVES of them at a time. Where
    the ranking is broken, every entry that is not ignored gets NaN. FIRST and SECOND tell which gradients at the values
    exist; the others are not read. For aLRP ``second_own`` holds the factors of the localisation errors, added up over
    the positives: a positive takes the sum at the last positive tied with it.
    """
    ranking, start, number = entries_of_program(starts, size, rankings, SINGLE, BLOCK)
    entries = tl.arange(0, BLOCK)
    inside = entries < number
    dtype = table.dtype.element_ty
    kind = tl.load(kinds + start + entries, mask=inside, other=0)
    is_broken = tl.load(broken + ranking) > 0
    _, positives, first_edge, edges = edges_of(first_positives, ranking, 2 if SMOOTH else 1)
    result = tl.where(is_broken & (kind != IGNORED), float("nan"), 0.0).to(dtype)
    count = tl.maximum(positives, 1).to(dtype)
    if FIRST:
        first_scale = divide(tl.load(first_upstream + ranking.to(tl.int64) * first_stride).to(dtype), count)
        relevant = (kind == RELEVANT) & (is_broken == 0)
        if tl.max(relevant.to(tl.int32), 0) > 0:
            x = tl.load(logits + start + entries, mask=relevant, other=0.0).to(dtype)
            edge = first_edge + last_edge_at_or_below(bounds, first_edge, edges, x, relevant)
            value = tl.load(table + 2 * edge, mask=relevant, other=0.0)
            if SMOOTH:
                inverse = compute_type(float64_from(inverse_bits), WIDE)
                slope = tl.load(table + 2 * edge + 1, mask=relevant, other=0.0)
                offset = offset_in_bucket(x, bounds, rests, edge, relevant, inverse, WIDE)
                value += (slope * offset).to(dtype)
            result = tl.where(relevant, first_scale * value, result)
    # Each entry is written once: positives below, unless the ranking is broken.
    tl.store(
        gradient + start + entries,
        result.to(gradient.dtype.element_ty),
        mask=inside & (is_broken | (kind != POSITIVE)),
    )
    if SECOND:
        second_scale = divide(tl.load(second_upstream + ranking.to(tl.int64) * second_stride).to(dtype), count)
    members = tl.sum((kind == POSITIVE).to(tl.int32), 0)
    if members > 0:
        # Positives beyond the capacity have no slot, and their ranking is broken.
        base = tl.load(block_slots + tl.program_id(0))
        end = tl.minimum(base + members, tl.load(first_positives + rankings))
        while base < end:
            slot = base + tl.arange(0, POSITIVES)
            here = slot < end
            row = tl.load(rows + slot, mask=here, other=0)
            at_positives = tl.zeros((POSITIVES,), dtype)
            if FIRST:
                at_positives += first_scale * tl.load(own + row, mask=here, other=0.0).to(dtype)
            if SECOND:
                if LOCALISED:
                    tied = tl.load(last_tied + row, mask=here, other=0)
                    factor = second_scale * tl.load(second_own + tied, mask=here, other=0.0).to(dtype)
                    factor = tl.where(is_broken, float("nan"), factor)
                    tl.store(localisation_gradient + slot, factor, mask=here & (slot < localisations))
                else:
                    at_positives += second_scale * tl.load(second_own + row, mask=here, other=0.0).to(dtype)
            entry = tl.load(index + slot, mask=here, other=0)
            tl.store(gradient + entry, at_positives.to(gradient.dtype.element_ty), mask=here & (is_broken == 0))
            base += POSITIVES
    if SECOND and LOCALISED:
        if tl.program_id(0) == 0:
            # The rest of the localisation errors belongs to no positive.
            base = tl.load(first_positives + rankings)
            while base < localisations:
                slot = base + tl.arange(0, POSITIVES)
                tl.store(localisation_gradient + slot, tl.zeros((POSITIVES,), dtype), mask=slot < localisations)
                base += POSITIVES
