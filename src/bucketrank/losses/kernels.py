"""The loops of ``fused.py``, compiled by numba.

They release the GIL, so that parts of one call run on several threads. numba compiles them on first use and caches the
result on disk. Indices into the look-up table are unsigned, which spares numba a test for negative ones.
"""

import numpy as np
from numba import njit

# Cells of the look-up table per edge: enough that few cells hold more than WINDOW edges.
CELLS_PER_EDGE = 2
# Edges per cell among which two comparisons find the bucket.
WINDOW = 3
# Edges up to which a linear search is faster than a binary one.
WALK = 8
# Logits per block of the look-up.
BLOCK = 1024
# The largest float64. It bounds a quotient, because 0 * inf would be NaN.
LARGEST = np.finfo(np.float64).max


def kernel(function):
    """Compile ``function`` on its first call, and cache the result on disk if possible."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # no writable cache folder: compile in every process
        return njit(nogil=True, error_model="numpy")(function)


@kernel
def all_finite(start, stop, logits, targets):
    """Return whether the logits that are not ignored and the targets of the positives are finite."""
    broken = False
    for j in range(start, stop):
        logit, target = logits[j], targets[j]
        # x - x is 0 only for finite x, and a NaN target is not below 0. Without branches the loop is vectorised.
        broken |= (not target < 0) & ((logit - logit != 0) | (target - target != 0))
    return not broken


@kernel
def merge_edges(scores, delta):
    """Return the edges, ascending, and their owners: i for the lower edge of positive i, ~i for its upper edge.

    Bucket k holds the logits with k edges at or below them. It reaches from ``edges[k]`` to ``edges[k + 1]``: the
    lowest edge is repeated at the front, and infinity follows the highest. Bucket 0 lies below all edges.
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
    """Return the look-up cell of ``x``, which is always valid and never decreases with ``x``."""
    return np.uint32(np.int32(min(max(0.0, (x - low) * cells_per_unit), last)))


@kernel
def round_up(edges, logits):
    """Round each edge up to the dtype of the logits, which gives the same buckets from fewer bytes.

    NaN follows the last edge. ``nan <= x`` is false for every x, so comparisons may read past the end.
    """
    bounds = np.full(edges.size + WINDOW - 1, np.nan, logits.dtype)
    for k in range(edges.size - 1):
        bounds[k] = edges[k]
        if bounds[k] < edges[k]:
            bounds[k] = np.nextafter(bounds[k], bounds.dtype.type(np.inf))
    return bounds


@kernel
def look_up_table(scores, delta, logits):
    """Return the edges and their owners, and the tables that find the bucket of a logit.

    The tables are the edges of :func:`round_up`, the number of edges before each of the equal cells that cover their
    range, and the number of cells per unit.
    """
    edges, owners = merge_edges(scores, delta)
    size = owners.size
    cells = CELLS_PER_EDGE * size
    span = edges[size] - edges[0]
    cells_per_unit = min(cells / span, LARGEST) if span > 0 else 0.0
    before = np.zeros(cells + 1, np.uint32)
    for k in range(size):
        before[cell_of(edges[k + 1], edges[0], cells_per_unit, cells - 1.0) + np.uint32(1)] += np.uint32(1)
    for cell in range(cells):
        before[cell + 1] += before[cell]
    return edges, owners, round_up(edges, logits), before, cells_per_unit


@kernel
def search_bounds(x, bounds, low, high):
    """Return the number of edges at or below ``x``, which lies between ``low`` and ``high``."""
    while high - low > WALK:
        middle = (low + high) >> 1
        if bounds[middle + 1] <= x:
            low = middle + 1
        else:
            high = middle
    while low < high and bounds[low + 1] <= x:
        low += 1
    return low


@kernel
def find_buckets(logits, low, bounds, before, cells_per_unit, numbers):
    """Write the bucket of each logit, the number of edges at or below it, to ``numbers``.

    Separate loops let memory reads overlap, because no logit waits for another.
    """
    last = before.size - 2.0
    one, two = np.uint32(1), np.uint32(2)
    for j in range(logits.size):
        numbers[j] = cell_of(np.float64(logits[j]), low, cells_per_unit, last)
    for j in range(logits.size):
        numbers[j] = before[numbers[j]]
    for j in range(logits.size):
        k = below = numbers[j]
        x = logits[j]
        # No branch depends on x, so none is mispredicted.
        k += np.uint32(bounds[k + two] <= x) * two
        k += np.uint32(bounds[k + one] <= x)
        if k - below == WINDOW:  # rarely
            cell = cell_of(np.float64(x), low, cells_per_unit, last)
            k = np.uint32(search_bounds(x, bounds, np.int64(k), np.int64(before[cell + one])))
        numbers[j] = k


@kernel
def keep_negatives(logits, targets, numbers):
    """Set the bucket of all entries but negatives to 0, and return whether all input is finite. Vectorised."""
    broken = False
    for j in range(logits.size):
        logit, target = logits[j], targets[j]
        numbers[j] = numbers[j] if target == 0 else np.uint32(0)
        broken |= (not target < 0) & ((logit - logit != 0) | (target - target != 0))
    return not broken


@kernel
def fill_buckets(start, stop, logits, targets, edges, bounds, before, cells_per_unit, numbers):
    """Count the negatives of each bucket, sum their offsets from its lower edge, and check that all input is finite.

    Also write the bucket of every negative to ``numbers``, and 0 for other entries.
    """
    flat = np.zeros(2 * (edges.size - 1))
    one = np.uint64(1)
    finite = True
    for first in range(start, stop, BLOCK):
        # Indices into a slice count from 0, so numba omits the test for negative ones.
        block = slice(first, min(first + BLOCK, stop))
        s, block_numbers = logits[block], numbers[block]
        find_buckets(s, edges[0], bounds, before, cells_per_unit, block_numbers)
        finite &= keep_negatives(s, targets[block], block_numbers)
        for j in range(s.size):
            k = np.uint64(block_numbers[j])
            # The bound is in the cache. The difference to the edge is corrected below.
            offset = np.float64(s[j]) - np.float64(bounds[k])
            flat[k << one] += 1
            flat[(k << one) + one] += offset
    buckets = flat.reshape(-1, 2)
    buckets[0] = 0  # also holds positives and ignored entries
    for bucket in range(1, edges.size - 1):
        if buckets[bucket, 0] > 0:
            buckets[bucket, 1] += buckets[bucket, 0] * (bounds[bucket] - edges[bucket])
    return buckets, finite


@kernel
def count_false_positives(edges, owners, buckets, delta):
    """Compute FP(i), the sum over negatives j of H(s_j - s_i), for each positive i, from the buckets."""
    count = 0.0  # negatives above the current edge
    if delta == 0:
        sums = np.empty(owners.size)
        for k in range(owners.size, 0, -1):
            count += buckets[k, 0]
            sums[k - 1] = count
        for k in range(1, owners.size):  # tied positives share the sum of the first
            if edges[k + 1] == edges[k]:
                sums[k] = sums[k - 1]
        return sums
    sums = np.empty(owners.size // 2)
    ramp = 0.0  # their summed distance from the current edge
    covering = 0  # ramps that cover the current bucket
    for k in range(owners.size, 0, -1):
        # No sum depends on a bucket that no ramp covers. Skipping it keeps the numbers small.
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
    """Express the sum over i of weights_i H(x - s_i) in each bucket as a line over the distance from the lowest edge.

    A row holds the line's value at the lowest edge and its slope. Two numbers per row save cache, and lose no more
    digits than the edges s +- delta have lost.
    """
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
            if covering == 0:  # clear the rounding error, which a very wide bucket would multiply
                slope = 0.0
        table[k, 0], table[k, 1] = value - slope * (edges[k] - edges[0]), slope
    return table


@kernel
def write_gradient(start, stop, logits, low, table, numbers, gradient):
    """Write the gradient at these entries, from the table; ``numbers`` and ``gradient`` may share memory."""
    s, part_numbers, out = logits[start:stop], numbers[start:stop], gradient[start:stop]
    for j in range(s.size):
        k = part_numbers[j]
        # Bucket 0 has gradient 0. It also holds ignored entries, which may be NaN, so there is no product.
        out[j] = table[k, 0] + table[k, 1] * (np.float64(s[j]) - low) if k > 0 else 0.0


@kernel
def windows(scores, delta):
    """Return x, the scores in units of 2 delta, and for each the window of scores where H is between 0 and 1.

    Gaps in x are clipped to 1, beyond which H is 0 or 1, so x stays small for distant logits too.
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
        while first < i and x[first] <= x[i] - 0.5:
            first += 1
        while beyond < size and x[beyond] < x[i] + 0.5:
            beyond += 1
        low[i], high[i] = first, beyond
    return x, low, high


@kernel
def sum_above(x, low, high, values):
    """Return the sum over j of h_ij values_j; h_ij is 0 for j < low_i, 1 for j >= high_i, else x_j - x_i + 1/2."""
    size, columns = values.shape
    sums = np.empty((size, columns))
    count = np.zeros(size + 1)  # sum of values from j on
    ramp = np.zeros(size + 1)  # sum of values times distance from x_j, from j on; no term is negative
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
def count_ranks(scores, edges, owners, buckets, delta):
    """Return FP(i) and rank(i) for each positive i. On small inputs, calls cost more than arithmetic."""
    false_positives = count_false_positives(edges, owners, buckets, delta)
    x, low, high = windows(scores, delta)
    rank = sum_above(x, low, high, np.ones((scores.size, 1)))[:, 0] + false_positives
    return false_positives, rank


@kernel
def sum_down(tree, node, end):
    """Return four sums over the tree nodes from ``node`` down to, but not including, ``end``, and the last node."""
    first = second = first_x = second_x = 0.0
    while node > end:
        first += tree[node, 0]
        second += tree[node, 1]
        first_x += tree[node, 2]
        second_x += tree[node, 3]
        node &= node - np.uint64(1)
    return first, second, first_x, second_x, node


@kernel
def sum_above_worse(start, stop, x, low, high, order, labels, values, sums):
    """Write the sum of :func:`sum_above` over only the j with a lower label than i, for i in ``order[start:stop]``.

    ``order`` sorts the labels. Positives enter a Fenwick tree over the score order by ascending label. ``values`` has
    exactly two columns, because additions without a loop over columns are vectorised.
    """
    size = np.uint64(x.size)
    while 0 < start < x.size and labels[order[start]] == labels[order[start - 1]]:
        start += 1  # equal labels stay in one part
    while 0 < stop < x.size and labels[order[stop]] == labels[order[stop - 1]]:
        stop += 1
    tree = np.zeros((x.size + 1, 4))  # sums of values, and of values times x; node size - j is positive j
    for k in range(start):
        j = np.uint64(order[k])
        for c in range(2):
            tree[size - j, c] = values[j, c]
            tree[size - j, 2 + c] = values[j, c] * x[j]
    for below in range(np.uint64(1), size + np.uint64(1)):
        above = below + (below & -below)
        if above <= size:
            for c in range(4):
                tree[above, c] += tree[below, c]
    begin = start
    while begin < stop:
        end = begin
        while end < stop and labels[order[end]] == labels[order[begin]]:
            end += 1
        for k in range(begin, end):  # equal labels are not worse, so read all sums before entering them
            i = np.uint64(order[k])
            a, b = size - np.uint64(low[i]), size - np.uint64(high[i])
            # The sum inside the window is the sum up to a minus the sum up to b. The two paths down meet.
            first, second, first_x, second_x, meeting = sum_down(tree, a, b)
            less_first, less_second, less_first_x, less_second_x, _ = sum_down(tree, b, meeting)
            beyond_first, beyond_second, _, _, _ = sum_down(tree, b, np.uint64(0))
            offset = 0.5 - x[i]
            sums[i, 0] = first_x - less_first_x + offset * (first - less_first) + beyond_first
            sums[i, 1] = second_x - less_second_x + offset * (second - less_second) + beyond_second
        for k in range(begin, end):
            j = np.uint64(order[k])
            node, first, second = size - j, values[j, 0], values[j, 1]
            while node <= size:
                tree[node, 0] += first
                tree[node, 1] += second
                tree[node, 2] += first * x[j]
                tree[node, 3] += second * x[j]
                node += node & -node
        begin = end
