"""Functions that several Triton kernels call: positions, searches, and the ramp of the smoothed step.

Loops over rankings of different lengths use one rule. If ranking g starts at ``starts[g]``, its blocks start at program
``starts[g] // BLOCK + g``. This leaves every ranking enough blocks, wastes at most one, and needs no table.

An edge is ``s_i - delta`` or ``s_i + delta``. Kernels compute in the *ramp type*: float64 if WIDE, else float32. No
digits are lost where a comparison is close: an edge is kept as a number of the logits' type plus a small rest.
"""

import triton
import triton.language as tl

LARGEST_FLOAT32 = tl.constexpr(3.4028234663852886e38)


@triton.jit
def float64_from(bits):
    """Return the float64 number with these bits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def block_of_ranking(starts, rankings, program, BLOCK: tl.constexpr):
    """Return the ranking of this program and its block number within the ranking."""
    low = program * 0
    high = low + rankings
    while high - low > 1:
        middle = (low + high) // 2
        first = (tl.load(starts + middle) // BLOCK).to(tl.int32) + middle
        low = tl.where(first <= program, middle, low)
        high = tl.where(first <= program, high, middle)
    return low, program - low - (tl.load(starts + low) // BLOCK).to(tl.int32)


@triton.jit
def edges_of(first_positives, ranking, PER_POSITIVE: tl.constexpr):
    """Return the first positive of a ranking, the number of its positives, and the same two for its edges."""
    first = tl.load(first_positives + ranking)
    positives = tl.load(first_positives + ranking + 1) - first
    return first, positives, first * PER_POSITIVE, positives * PER_POSITIVE


@triton.jit
def count_copies(first_positives, rankings, PER_POSITIVE: tl.constexpr, COPIES: tl.constexpr, BUCKETS: tl.constexpr):
    """Return the total number of edges, and the number of bucket copies.

    The copies hold at most BUCKETS buckets in total. The kernels count the positives themselves, because the host only
    knows an upper bound.
    """
    edges = tl.load(first_positives + rankings) * PER_POSITIVE
    return edges, tl.minimum(tl.maximum(BUCKETS // tl.maximum(edges, 1), 1), COPIES)


@triton.jit
def entries_of_program(starts, size, rankings, SINGLE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the ranking of this program, its first position in the logits, and how many of BLOCK entries it has.

    The position is 64 bits wide; positions relative to it take half the registers.
    """
    program = tl.program_id(0)
    if SINGLE:
        ranking = program * 0
        start = program.to(tl.int64) * BLOCK
        end = size.to(tl.int64)
    else:
        ranking, block = block_of_ranking(starts, rankings, program, BLOCK)
        start = tl.load(starts + ranking) + block.to(tl.int64) * BLOCK
        end = tl.load(starts + ranking + 1)
    return ranking, start, tl.minimum(end - start, BLOCK).to(tl.int32)


@triton.jit
def count_within(scores, first, count, limit, gap, INCLUDE: tl.constexpr):
    """Return how many of ``count`` ascending scores lie at most ``gap`` above ``limit``; strictly less if not INCLUDE.

    All arguments are scalars. The differences are taken in float64.
    """
    low = first
    high = first + count
    while low < high:
        middle = (low + high) // 2
        difference = tl.load(scores + middle).to(tl.float64) - limit
        if INCLUDE:
            within = difference <= gap
        else:
            within = difference < gap
        low = tl.where(within, middle + 1, low)
        high = tl.where(within, high, middle)
    return low - first


@triton.jit
def last_edge_at_or_below(bounds, first, count, x, searching):
    """Return the position of the last of ``count`` ascending bounds that is at most ``x``; the first one must be."""
    position = tl.zeros_like(x).to(tl.int32)
    remaining = count
    while remaining > 1:
        half = remaining // 2
        bound = tl.load(bounds + first + position + half, mask=searching, other=0.0)
        position = tl.where(bound <= x, position + half, position)
        remaining -= half
    return position


@triton.jit
def compute_type(x, WIDE: tl.constexpr):
    """Convert ``x`` to the ramp type."""
    return x.to(tl.float64 if WIDE else tl.float32)


@triton.jit
def exact_sum(a, b):
    """Return ``a + b`` of two float64 numbers, rounded, and the rounding error."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@triton.jit
def split_sum(a, b, WIDE: tl.constexpr):
    """Return two numbers of the ramp type that add up to ``a + b``; the first is finite."""
    total, error = exact_sum(a, b)
    if WIDE:
        high = total
        low = error
    else:
        high = tl.minimum(tl.maximum(total, -LARGEST_FLOAT32), LARGEST_FLOAT32).to(tl.float32)
        low = ((total - high.to(tl.float64)) + error).to(tl.float32)
    return high, low


@triton.jit
def divide(a, b):
    """Return ``a / b``, correctly rounded, which Triton's float32 operator is not."""
    if a.dtype == tl.float64:
        quotient = a / b
    else:
        quotient = tl.div_rn(a, b)
    return quotient


@triton.jit
def clamp_to_unit(x):
    """Return ``x`` clamped to the interval from 0 to 1."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def offset_in_bucket(x, bounds, rests, edge, relevant, inverse, WIDE: tl.constexpr):
    """Return the distance of ``x`` from an edge at or below it in units of 2 delta, clipped to 1.

    The edge is ``bound - rest``. Neither ``x - bound`` nor ``rest`` is negative, so their sum loses no digits.
    """
    bound = compute_type(tl.load(bounds + edge, mask=relevant, other=0.0), WIDE)
    rest = tl.load(rests + edge, mask=relevant, other=0.0)
    return clamp_to_unit(((compute_type(x, WIDE) - bound) + rest) * inverse)


@triton.jit
def bucket_width(owners, scores, first_edge, edge, edges, inside, inverse):
    """Return the width of the bucket above each edge in units of 2 delta, clipped to 1; 0 above the last edge.

    A bucket wider than 2 delta lies inside no ramp, so its width does not matter.
    """
    followed = inside & (edge + 1 < edges)
    lower = tl.load(owners + first_edge + edge, mask=followed, other=0)
    upper = tl.load(owners + first_edge + edge + 1, mask=followed, other=0)
    lower_score = tl.load(scores + tl.where(lower < 0, ~lower, lower), mask=followed, other=0.0).to(tl.float64)
    upper_score = tl.load(scores + tl.where(upper < 0, ~upper, upper), mask=followed, other=0.0).to(tl.float64)
    between = (lower >= 0).to(tl.float64) - (upper >= 0).to(tl.float64)
    return tl.where(followed, clamp_to_unit((upper_score - lower_score) * inverse + between), 0.0)
