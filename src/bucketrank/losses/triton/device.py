"""Functions that several Triton kernels call: positions, searches and the ramp of the smoothed step.

Loops over rankings of different lengths use one rule. If ranking g starts at ``starts[g]``, its blocks start at program
``starts[g] // BLOCK + g``. This leaves every ranking enough blocks, wastes at most one, and needs no table.
"""

import triton
import triton.language as tl


@triton.jit
def float64_from(bits):
    """Return the float64 number with these bits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def block_of_ranking(starts, rankings, program, BLOCK: tl.constexpr):
    """Return the ranking of this program and the number of its block inside that ranking."""
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
def entries_of_program(starts, size, rankings, SINGLE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the ranking of this program, its BLOCK positions in the logits, and which of them are in the ranking."""
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if SINGLE:
        ranking = program * 0
        entries = program.to(tl.int64) * BLOCK + lanes
        inside = entries < size
    else:
        ranking, block = block_of_ranking(starts, rankings, program, BLOCK)
        entries = tl.load(starts + ranking) + block.to(tl.int64) * BLOCK + lanes
        inside = entries < tl.load(starts + ranking + 1)
    return ranking, entries, inside


@triton.jit
def count_within(scores, first, count, most, limit, gap, INCLUDE: tl.constexpr):
    """Return how many of ``count`` ascending scores lie at most ``gap`` above ``limit``; strictly less if not INCLUDE.

    The differences are taken in float64. ``first``, ``count`` and ``limit`` are scalars or blocks; the scalar ``most``
    is at least every count.
    """
    low = first
    high = first + count
    steps = most
    while steps > 0:
        middle = (low + high) // 2
        searching = low < high
        difference = tl.load(scores + middle, mask=searching, other=0.0).to(tl.float64) - limit
        if INCLUDE:
            within = difference <= gap
        else:
            within = difference < gap
        low = tl.where(searching & within, middle + 1, low)
        high = tl.where(searching & (within == 0), middle, high)
        steps = steps // 2
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
def split_float64(value, WIDE: tl.constexpr):
    """Return two numbers of the type in which ramps are computed, whose sum is ``value``."""
    if WIDE:
        high = value
        low = value * 0
    else:
        high = value.to(tl.float32)
        low = (value - high.to(tl.float64)).to(tl.float32)
    return high, low


@triton.jit
def compute_type(x, WIDE: tl.constexpr):
    """Convert ``x`` to the type in which ramps are computed: float64 if WIDE, else float32."""
    return x.to(tl.float64 if WIDE else tl.float32)


@triton.jit
def ramp(x, score, edge_high, edge_low, inverse):
    """Return (x - score + edge) * inverse, with few digits lost even where the sum is near 0; edge = high + low.

    The rounding error of ``x - score`` is computed and added back, so that float32 is enough.
    """
    difference = x - score
    virtual = difference - x
    error = (x - (difference - virtual)) - (score + virtual)
    error = tl.where(tl.abs(difference) < float("inf"), error, 0.0)
    return ((difference + edge_high) + (error + edge_low)) * inverse


@triton.jit
def clamp_to_unit(x):
    """Return ``x`` clamped to the interval from 0 to 1."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def bucket_width(owners, scores, first_edge, edge, edges, inside, inverse):
    """Return the width of the bucket above each edge in units of 2 delta, cut to 1; 0 above the last edge.

    A bucket wider than 2 delta lies inside no ramp, so its width does not matter.
    """
    followed = inside & (edge + 1 < edges)
    lower = tl.load(owners + first_edge + edge, mask=followed, other=0)
    upper = tl.load(owners + first_edge + edge + 1, mask=followed, other=0)
    lower_score = tl.load(scores + tl.where(lower < 0, ~lower, lower), mask=followed, other=0.0).to(tl.float64)
    upper_score = tl.load(scores + tl.where(upper < 0, ~upper, upper), mask=followed, other=0.0).to(tl.float64)
    between = (lower >= 0).to(tl.float64) - (upper >= 0).to(tl.float64)
    return tl.where(followed, clamp_to_unit((upper_score - lower_score) * inverse + between), 0.0)
