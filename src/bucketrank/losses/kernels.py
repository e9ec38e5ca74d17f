"""The compiled loops behind ``fused.py``, in plain Python for numba.

All release the GIL, so that parts of one call run on several threads. Compiled on first use and cached on disk.
Indices into the look-up table are unsigned, which spares numba the test for negative ones.
"""

import numpy as np
from numba import njit

# Cells of the look-up table for each edge: enough that most cells hold no edge or one.
CELLS_PER_EDGE = 4
# Edges in one cell up to which walking beats halving.
WALK = 8
# Logits looked up together.
BLOCK = 512


def kernel(function):
    """Compile ``function`` when it is first called, and keep the result on disk if there is a place for it."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written: compiled in every process
        return njit(nogil=True, error_model="numpy")(function)


@kernel
def all_finite(start, stop, logits, targets):
    """Whether all that takes part among these entries is finite: logits not ignored, targets of positives."""
    broken = False
    for j in range(start, stop):
        logit, target = logits[j], targets[j]
        # x - x is 0 for finite x alone; a NaN target is not below 0. No branches: this loop runs in vector registers.
        broken |= (not target < 0) & ((logit - logit != 0) | (target - target != 0))
    return not broken


@kernel
def merge_edges(scores, delta):
    """The edges in ascending order, and their owners: i for the lower edge of positive i, ~i for its upper edge.

    Before them the lowest once more, after them infinity: bucket k, which holds the logits that k edges lie at or
    below, reaches from ``edges[k]`` to ``edges[k + 1]``. Bucket 0 lies below all edges.
    """
    size = scores.size if delta == 0 else 2 * scores.size
    edges = np.full(size + 2, np.inf)
    owners = np.empty(size, np.int64)
    low = high = 0
    for k in range(size):
        if delta == 0:
            edges[k + 1], owners[k] = scores[k], k
        elif low < scores.size and scores[low] - delta <= scores[high] + delta:
            edges[k + 1], owners[k] = scores[low] - delta, low
            low += 1
        else:
            edges[k + 1], owners[k] = scores[high] + delta, ~high
            high += 1
    edges[0] = edges[1]
    return edges, owners


@kernel
def cell_of(x, low, cells_per_unit, last):
    """The cell of the look-up table that holds ``x``: never decreasing in ``x``, and always a cell."""
    return np.uint32(np.int32(min(max(0.0, (x - low) * cells_per_unit), last)))


@kernel
def look_up_table(scores, delta):
    """The edges, their owners, how many edges come before each of the equal cells over their range, cells per unit."""
    edges, owners = merge_edges(scores, delta)
    size = owners.size
    cells = CELLS_PER_EDGE * size
    span = edges[size] - edges[0]
    cells_per_unit = cells / span if span > 0 else 0.0
    before = np.zeros(cells + 1, np.uint32)
    for k in range(size):
        before[cell_of(edges[k + 1], edges[0], cells_per_unit, cells - 1.0) + np.uint32(1)] += np.uint32(1)
    for cell in range(cells):
        before[cell + 1] += before[cell]
    return edges, owners, before, cells_per_unit


@kernel
def search_edges(x, edges, low, high):
    """How many edges are at or below ``x``, known to be ``low`` to ``high``."""
    while high - low > WALK:
        middle = (low + high) >> 1
        if edges[middle + 1] <= x:
            low = middle + 1
        else:
            high = middle
    while low < high and edges[low + 1] <= x:
        low += 1
    return low


@kernel
def find_buckets(start, stop, logits, edges, before, cells_per_unit, found, edges_in_cell):
    """For each of these logits, how many edges are at or below it, into ``found`` from its beginning on.

    In stages: within one, no logit waits for another, so the processor fetches many parts of the tables at a time.
    """
    last = before.size - 2.0
    one = np.uint32(1)
    for i in range(stop - start):
        found[i] = cell_of(np.float64(logits[start + i]), edges[0], cells_per_unit, last)
    for i in range(stop - start):
        cell = found[i]
        found[i] = before[cell]
        edges_in_cell[i] = before[cell + one] - before[cell]
    for i in range(stop - start):
        low, inside, x = found[i], edges_in_cell[i], np.float64(logits[start + i])
        if inside <= one:  # nearly always, and then no branch depends on x: the processor need not guess
            found[i] = low + np.uint32(edges[low + one] <= x)
        else:
            found[i] = search_edges(x, edges, np.int64(low), np.int64(low) + np.int64(inside))


@kernel
def fill_buckets(start, stop, logits, targets, edges, before, cells_per_unit, found):
    """Per bucket: how many of these negatives it holds, and their offsets from its lower edge, summed.

    Also leaves the bucket of every logit in ``found``, unless that is empty, and tells whether all that takes part is
    finite.
    """
    buckets = np.zeros((edges.size - 1, 2))
    block, scratch = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    broken = False
    for first in range(start, stop, BLOCK):
        end = min(first + BLOCK, stop)
        here = found[first:end] if found.size else block
        find_buckets(first, end, logits, edges, before, cells_per_unit, here, scratch)
        for j in range(first, end):
            target, x = targets[j], np.float64(logits[j])
            if target == 0:
                k = here[j - first]
                buckets[k, 0] += 1
                buckets[k, 1] += x - edges[k]
                broken |= x - x != 0
            elif not target < 0:  # a positive, or NaN
                broken |= (x - x != 0) | (target - target != 0)
    return buckets, not broken


@kernel
def count_false_positives(edges, owners, buckets, delta):
    """sum over negatives j of H(s_j - s_i) for each positive i, from the buckets."""
    count = 0.0  # negatives above the current edge
    if delta == 0:
        sums = np.empty(owners.size)
        for k in range(owners.size, 0, -1):
            count += buckets[k, 0]
            sums[k - 1] = count
        for k in range(1, owners.size):  # tied positives see the same negatives: all that the first of them sees
            if edges[k + 1] == edges[k]:
                sums[k] = sums[k - 1]
        return sums
    sums = np.empty(owners.size // 2)
    ramp = 0.0  # the distances of those negatives from the current edge, added up
    covering = 0  # ramps that cover the current bucket
    for k in range(owners.size, 0, -1):
        # Nothing depends on a bucket that no ramp covers; leaving it out keeps the numbers small.
        if covering > 0:
            ramp += count * (edges[k + 1] - edges[k]) + buckets[k, 1]
        count += buckets[k, 0]
        owner = owners[k - 1]
        if owner >= 0:
            sums[owner] = (ramp - sums[owner]) / (2 * delta)
            covering -= 1
        else:
            sums[~owner] = ramp
            covering += 1
    return sums


@kernel
def gradient_table(edges, owners, weights, delta):
    """Per bucket: sum over i of weights_i H(. - s_i) at its lower edge, and the slope of that sum inside."""
    table = np.zeros((edges.size - 1, 2))
    value = slope = 0.0
    covering = 0
    for k in range(1, owners.size + 1):
        owner = owners[k - 1]
        if delta == 0:
            value += weights[owner]
        else:
            if covering > 0:
                value += slope * (edges[k] - edges[k - 1])
            if owner >= 0:
                slope += weights[owner] / (2 * delta)
                covering += 1
            else:
                slope -= weights[~owner] / (2 * delta)
                covering -= 1
            if covering == 0:  # without what rounding left of it: the bucket may be very wide
                slope = 0.0
        table[k, 0], table[k, 1] = value, slope
    return table


@kernel
def write_gradient(start, stop, logits, targets, edges, before, cells_per_unit, found, table, gradient):
    """The gradient at these entries: read off the table at the negatives, 0 elsewhere.

    ``found`` holds the bucket of every logit, or is empty.
    """
    block, scratch = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
    for first in range(start, stop, BLOCK):
        end = min(first + BLOCK, stop)
        here = found[first:end] if found.size else block
        if not found.size:
            find_buckets(first, end, logits, edges, before, cells_per_unit, here, scratch)
        for j in range(first, end):
            k, x = here[j - first], np.float64(logits[j])
            gradient[j] = table[k, 0] + table[k, 1] * (x - edges[k]) if targets[j] == 0 else 0.0


@kernel
def windows(scores, delta):
    """The positives in units of 2 delta, and for each the window of those that compare with it as between 0 and 1.

    Gaps are cut to 1, as nothing depends on what is beyond: the numbers stay small however far the logits are spread.
    """
    size = scores.size
    x = np.empty(size)
    low = np.empty(size, np.int64)
    high = np.empty(size, np.int64)
    origin = scores[0]
    if delta == 0:
        for i in range(size):
            x[i] = scores[i] - origin
            low[i] = high[i] = low[i - 1] if i > 0 and scores[i] == scores[i - 1] else i
        return x, low, high
    for i in range(size):
        if i > 0 and scores[i] - scores[i - 1] > 2 * delta:
            origin += scores[i] - scores[i - 1] - 2 * delta
        x[i] = (scores[i] - origin) / (2 * delta)
    first = beyond = 0
    for i in range(size):
        while x[first] <= x[i] - 0.5:
            first += 1
        while beyond < size and x[beyond] < x[i] + 0.5:
            beyond += 1
        low[i], high[i] = first, beyond
    return x, low, high


@kernel
def sum_above(x, low, high, values):
    """sum over j of h_ij values_j: h_ij is 0 for j < low_i, 1 for j >= high_i and x_j - x_i + 1/2 for those between."""
    size, columns = values.shape
    sums = np.empty((size, columns))
    count = np.zeros(size + 1)  # from j on, the sum of values
    ramp = np.zeros(size + 1)  # from j on, values times distance from x_j: no term is negative
    for c in range(columns):
        for j in range(size - 1, -1, -1):
            gap = x[j + 1] - x[j] if j + 1 < size else 0.0
            ramp[j] = ramp[j + 1] + count[j + 1] * gap
            count[j] = count[j + 1] + values[j, c]
        for i in range(size):
            a, b = low[i], high[i]
            total = count[b]
            if a < b:
                total = ramp[a] + count[a] * (x[a] - x[i] + 0.5)
                if b < size:
                    total -= ramp[b] + count[b] * (x[b] - x[i] - 0.5)
            sums[i, c] = total
    return sums


@kernel
def sum_above_worse(start, stop, x, low, high, order, labels, values, sums):
    """The same over only the j with a lower label than i, for the i at ``order[start:stop]``; ``order`` sorts labels.

    A Fenwick tree over the positives in order of score, into which they are entered by ascending label.
    """
    size, columns = values.shape
    while 0 < start < size and labels[order[start]] == labels[order[start - 1]]:
        start += 1  # equal labels are answered together, by whoever has the first
    while 0 < stop < size and labels[order[stop]] == labels[order[stop - 1]]:
        stop += 1
    tree = np.zeros((size + 1, 2 * columns))  # of values, and of values times x; node size - j stands for positive j
    for k in range(start):
        j = order[k]
        for c in range(columns):
            tree[size - j, c] = values[j, c]
            tree[size - j, columns + c] = values[j, c] * x[j]
    for node in range(1, size + 1):
        above = node + (node & -node)
        if above <= size:
            for c in range(2 * columns):
                tree[above, c] += tree[node, c]
    ramp = np.empty(2 * columns)
    begin = start
    while begin < stop:
        end = begin
        while end < stop and labels[order[end]] == labels[order[begin]]:
            end += 1
        for k in range(begin, end):  # equal labels are not worse: ask for all of them, then enter them
            i = order[k]
            ramp[:] = 0
            a, b = size - low[i], size - high[i]
            while a > b:
                for c in range(2 * columns):
                    ramp[c] += tree[a, c]
                a &= a - 1
            while b > a:
                for c in range(2 * columns):
                    ramp[c] -= tree[b, c]
                b &= b - 1
            for c in range(columns):
                sums[i, c] = ramp[columns + c] + (0.5 - x[i]) * ramp[c]
            b = size - high[i]
            while b > 0:
                for c in range(columns):
                    sums[i, c] += tree[b, c]
                b &= b - 1
        for k in range(begin, end):
            j = order[k]
            a = size - j
            while a <= size:
                for c in range(columns):
                    tree[a, c] += values[j, c]
                    tree[a, columns + c] += values[j, c] * x[j]
                a += a & -a
        begin = end
