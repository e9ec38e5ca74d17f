"""The Triton kernel that turns the buckets of a ranking into its values, its gradients and the table of lines.

One program scans one ranking, over its edges and its positives, tile by tile in one order. The errors and weights of
each loss are those of ``terms.py``, written again: each torch operation of that module would be a separate launch.
"""

import triton
import triton.language as tl

from bucketrank.losses.triton.device import bucket_width, edges_of, float64_from

# Same value as in terms.py.
ALRP_LEAST_FALSE_POSITIVES = tl.constexpr(1e-5)


@triton.jit
def _scan_buckets(
    first_edge, edges, owners, scores, buckets, ramps, part, inverse, SMOOTH: tl.constexpr, TILE: tl.constexpr
):
    """Write a sum over the negatives above each edge to ``ramps``: their distances from it, at delta 0 their number.

    Distances are in units of 2 delta. Buckets wider than 2 delta count as 2 delta wide, which cancels in FP(i).
    """
    above = tl.zeros((), tl.int64)
    distance = tl.zeros((), tl.float64)
    start = edges * 0
    while start < edges:
        edge = edges - 1 - start - tl.arange(0, TILE)
        inside = edge >= 0
        address = buckets + 2 * (first_edge + edge)
        members = tl.load(address, mask=inside, other=0)
        reached = above + tl.cumsum(members, 0)
        if SMOOTH:
            offsets = tl.load(address + 1, mask=inside, other=0).to(tl.float64) * part
            width = bucket_width(owners, scores, first_edge, edge, edges, inside, inverse)
            gained = offsets + width * (reached - members).to(tl.float64)
            tl.store(ramps + first_edge + edge, distance + tl.cumsum(gained, 0), mask=inside)
            distance += tl.sum(gained, 0)
        else:
            tl.store(ramps + first_edge + edge, reached.to(tl.float64), mask=inside)
        above += tl.sum(members, 0)
        start += TILE


@triton.jit
def smaller(a, b):
    """Return the smaller of two numbers."""
    return tl.minimum(a, b)


@triton.jit
def _compute_terms(
    first,
    positives,
    lower_edges,
    upper_edges,
    ramps,
    ranks,
    shares,
    seconds,
    weights,
    own,
    factors,
    LOSS: tl.constexpr,
    SMOOTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the weights of the negatives and the positives' own gradients; return the sums of the two errors."""
    first_sum = tl.zeros((TILE,), tl.float64)
    second_sum = tl.zeros((TILE,), tl.float64)
    lowest = tl.zeros((), tl.float64) + float("inf")
    inverse_ranks = tl.zeros((), tl.float64)
    start = positives * 0
    while start < positives:
        inside = start + tl.arange(0, TILE) < positives
        row = first + start + tl.arange(0, TILE)
        lower = tl.load(lower_edges + row, mask=inside, other=0)
        false_positives = tl.load(ramps + lower, mask=inside, other=0.0)
        if SMOOTH:
            upper = tl.load(upper_edges + row, mask=inside, other=0)
            false_positives -= tl.load(ramps + upper, mask=inside, other=0.0)
            false_positives = tl.maximum(false_positives, 0.0)
        rank = tl.load(ranks + row, mask=inside, other=1.0) + false_positives
        if SMOOTH and (LOSS == "interpolated_ap" or LOSS == "alrp"):
            rank += 0.5  # a positive counts itself as 1, not as H(0)
        weight = 1 / rank
        error = false_positives * weight
        pushed = error
        if LOSS == "interpolated_ap":
            own_error = tl.where(inside, error, float("inf"))
            error = tl.minimum(tl.associative_scan(own_error, 0, smaller), lowest)
            lowest = tl.minimum(tl.min(own_error, 0), lowest)
            weight = error / tl.where(own_error > 0, own_error, 1.0) * weight
            pushed = error
        if LOSS == "alrp":
            pushes = false_positives > ALRP_LEAST_FALSE_POSITIVES
            others = tl.load(shares + row, mask=inside, other=0.0)
            second_sum += tl.where(inside, tl.load(seconds + row, mask=inside, other=0.0) * weight, 0.0)
            inverse_rank = tl.where(inside, weight, 0.0)
            tl.store(factors + row, inverse_ranks + tl.cumsum(inverse_rank, 0), mask=inside)
            inverse_ranks += tl.sum(inverse_rank, 0)
            pushed = tl.where(pushes, (others + false_positives) * weight, 0.0)
            weight = pushed / tl.where(pushes, false_positives, 1.0)
        if LOSS == "rs":
            second_sum += tl.load(seconds + row, mask=inside, other=0.0)
        first_sum += tl.where(inside, error, 0.0)
        tl.store(weights + row, weight, mask=inside)
        # 0 - x, because -x would be -0. where there is no error.
        tl.store(own + row, 0.0 - pushed, mask=inside)
        start += TILE
    return tl.sum(first_sum, 0), tl.sum(second_sum, 0)


@triton.jit
def _write_table(first_edge, edges, owners, scores, weights, table, inverse, SMOOTH: tl.constexpr, TILE: tl.constexpr):
    """Write, per bucket, the sum over i of weights_i H(. - s_i) as a line: value at the lower edge, and slope."""
    slope_before = tl.zeros((), tl.float64)
    value_before = tl.zeros((), tl.float64)
    start = edges * 0
    while start < edges:
        edge = start + tl.arange(0, TILE)
        inside = edge < edges
        owner = tl.load(owners + first_edge + edge, mask=inside, other=0)
        weight = tl.load(weights + tl.where(owner < 0, ~owner, owner), mask=inside, other=0.0)
        if SMOOTH:
            change = tl.where(owner < 0, -weight, weight)
            slope = slope_before + tl.cumsum(change, 0)
            slope_before += tl.sum(change, 0)
            rise = slope * bucket_width(owners, scores, first_edge, edge, edges, inside, inverse)
            value = value_before + tl.cumsum(rise, 0) - rise
            value_before += tl.sum(rise, 0)
            tl.store(table + 2 * (first_edge + edge) + 1, slope, mask=inside)
        else:
            value = value_before + tl.cumsum(weight, 0)
            value_before += tl.sum(weight, 0)
        tl.store(table + 2 * (first_edge + edge), value, mask=inside)
        start += TILE


@triton.jit(do_not_specialize=["inverse_bits"])
def finish_rankings(
    first_positives,
    owners,
    scores,
    buckets,
    ramps,
    lower_edges,
    upper_edges,
    ranks,
    shares,
    seconds,
    weights,
    own,
    factors,
    table,
    broken,
    positive_count,
    first_values,
    second_values,
    counts,
    part,
    inverse_bits,
    LOSS: tl.constexpr,
    SMOOTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the values of a ranking and everything for its gradient; ``part`` is the unit of the offsets.

    With CAPACITY, also mark the ranking as broken if there are more positives than were kept.
    """
    ranking = tl.program_id(0)
    first, kept, first_edge, edges = edges_of(first_positives, ranking, 2 if SMOOTH else 1)
    inverse = float64_from(inverse_bits)
    _scan_buckets(first_edge, edges, owners, scores, buckets, ramps, part, inverse, SMOOTH, TILE)
    tl.debug_barrier()  # other threads read these sums
    first_sum, second_sum = _compute_terms(
        first, kept, lower_edges, upper_edges, ramps, ranks, shares, seconds, weights, own, factors, LOSS, SMOOTH, TILE
    )
    is_broken = tl.load(broken + ranking) > 0
    if CAPACITY:
        is_broken = is_broken | (tl.load(positive_count) != tl.load(first_positives + tl.num_programs(0)))
    tl.debug_barrier()  # other threads read these weights, and all threads have loaded the flag
    if CAPACITY:
        tl.store(broken + ranking, is_broken.to(tl.int32))
    count = tl.maximum(kept, 1).to(tl.float64)
    tl.store(first_values + ranking, tl.where(is_broken, float("nan"), first_sum / count))
    if LOSS == "rs" or LOSS == "alrp":
        tl.store(second_values + ranking, tl.where(is_broken, float("nan"), second_sum / count))
    tl.store(counts + ranking, kept)
    _write_table(first_edge, edges, owners, scores, weights, table, inverse, SMOOTH, TILE)
