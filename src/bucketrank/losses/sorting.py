"""Compiled loops that sort the positives of each ranking, and the decorators that compile all loops of ``fused.py``."""

from functools import partial

import numpy as np
from numba import njit

# Run length of the insertion sort before merging, and maximum length of a merge sort; beyond it numpy is faster.
RUN = 16
MAX_SORTED = 1 << 8


def kernel(function, *, forceinline=False):
    """Compile ``function`` on its first call, and cache the result on disk if possible."""
    options = {"nogil": True, "error_model": "numpy", "forceinline": forceinline}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no writable cache folder: compile in every process
        return njit(**options)(function)


# Decorator for functions that only kernels call. Without inlining, numba optimises a callee again inside each cached
# caller, and makes it slower.
inlined = partial(kernel, forceinline=True)


@inlined
def max_positives(begin, end, first):
    """Return the maximum number of positives per ranking."""
    largest = 0
    for g in range(begin, end):
        largest = max(largest, first[g + 1] - first[g])
    return largest


@inlined
def sort_run(values, order, start, stop):
    """Sort ``order[start:stop]`` by ``values``, by insertion; equal values keep their order."""
    for k in range(start + 1, stop):
        index = order[k]
        value = values[index]
        j = k
        while j > start and values[order[j - 1]] > value:
            order[j] = order[j - 1]
            j -= 1
        order[j] = index


@inlined
def merge_runs(values, order, buffer, start, middle, stop):
    """Merge two sorted runs of ``order``; equal values keep their order."""
    for k in range(start, middle):
        buffer[k - start] = order[k]
    left, right = 0, middle
    for k in range(start, stop):
        if left == middle - start:
            return
        if right < stop and values[order[right]] < values[buffer[left]]:
            order[k] = order[right]
            right += 1
        else:
            order[k] = buffer[left]
            left += 1


@kernel
def sort_rankings(begin, end, first, values, order):
    """Write the order that sorts the values of each ranking with at most MAX_SORTED of them."""
    buffer = np.empty(min(MAX_SORTED, max_positives(begin, end, first)), np.int64)
    for g in range(begin, end):
        start, stop = first[g], first[g + 1]
        if stop - start > MAX_SORTED:
            continue
        for run in range(start, stop, RUN):
            for i in range(run, min(run + RUN, stop)):
                order[i] = i
            sort_run(values, order, run, min(run + RUN, stop))
        width = RUN
        while width < stop - start:
            for run in range(start, stop - width, 2 * width):
                merge_runs(values, order, buffer, run, run + width, min(run + 2 * width, stop))
            width *= 2


@kernel
def gather_rankings(begin, end, first, broken, values, positions, order, scores, at):
    """Sort the positives of each ranking by score, and find the broken rankings.

    ``order`` already has the order of rankings with more than MAX_SORTED positives. Return the largest absolute score
    of the rankings that are not broken.
    """
    sort_rankings(begin, end, first, values, order)
    largest = 0.0
    for g in range(begin, end):
        own_largest = 0.0
        for i in range(first[g], first[g + 1]):
            score = values[order[i]]
            scores[i], at[i] = score, positions[order[i]]
            if score - score != 0:  # NaN or infinite
                broken[g] = True
            own_largest = max(own_largest, abs(score))
        if not broken[g]:
            largest = max(largest, own_largest)
    return largest
