"""The loops of ``fused.py``, compiled by numba.

They release the GIL, so that parts of one call run on several threads. numba compiles them on first use and caches the
result on disk. Indices into the look-up table are unsigned, which spares numba a test for negative ones.

Kernels with the arguments ``begin, end`` loop over these rankings of a call; the others handle one ranking. ``first``
holds the offset of each ranking among all positives. Rankings that are ``broken``, with NaN or Inf, are skipped.
"""

import numpy as np

from bucketrank.losses.sorting import inlined, kernel, max_positives

# Cells of the look-up table per edge: enough that few cells hold more than WINDOW edges.
CELLS_PER_EDGE = 2
# Edges per cell among which two comparisons find the bucket.
WINDOW = 3
# Edges up to which a linear search is faster than a binary one.
WALK = 8
# Logits per block of the look-up.
BLOCK = 1024
# Space that a ranking's tables need besides its edges.
PADDING = WINDOW + 1
# Numbers per partial sum of a mean.
SUMMED = 16
# The largest float64. It bounds a quotient, because 0 * inf would be NaN.
LARGEST = np.finfo(np.float64).max


@inlined
def all_finite(start, stop, logits, targets):
    """Return whether the logits that are not ignored and the targets of the positives are finite."""
    broken = False
    for j in range(start, stop):
        logit, target = logits[j], targets[j]
        # x - x is 0 only for finite x, and a NaN target is not below 0. Without branches the loop is vectorised.
        broken |= (not target < 0) & ((logit - logit != 0) | (target - target != 0))
    return not broken


@inlined
def merge_edges(scores, delta, edges, owners):
    """Write the edges, in ascending order, and their owners: i for the lower edge of positive i, ~i for its upper edge.

    Bucket k holds the logits with k edges at or below them. It reaches from ``edges[k]`` to ``edges[k + 1]``: the
    lowest edge is repeated at the front, and infinity follows the highest. Bucket 0 lies below all edges.
    """
    low = high = 0
    for k in range(owners.size):
        if delta == 0:
            edges[k + 1], owners[k] = scores[k], k
        elif low < scores.size and scores[low] - delta <= scores[high] + delta:
            edges[k + 1], owners[k] = scores[low] - delta, low
            low += 1
        else:
            edges[k + 1], owners[k] = scores[high] + delta, ~high
            high += 1
    edges[0], edges[edges.size - 1] = edges[1], np.inf


@inlined
def cell_of(x, low, cells_per_unit, last):
    """Return the look-up cell of ``x``, which is always valid and never decreases with ``x``."""
    return np.uint32(np.int32(min(max(0.0, (x - low) * cells_per_unit), last)))


@inlined
def round_up(edges, bounds):
    """Round each edge up to the dtype of the logits, which gives the same buckets from fewer bytes.

    NaN follows the last edge. ``nan <= x`` is false for every x, so comparisons may read past the end.
    """
    for k in range(edges.size - 1):
        bounds[k] = edges[k]
        if bounds[k] < edges[k]:
            bounds[k] = np.nextafter(bounds[k], bounds.dtype.type(np.inf))
    bounds[edges.size - 1 :] = np.nan


@inlined
def look_up_table(scores, delta, edges, owners, bounds, before):
    """Write the edges and their owners, and the tables that find the bucket of a logit; return the cells per unit.

    The tables are the edges of :func:`round_up` and the number of edges before each of the equal cells that cover their
    range.
    """
    merge_edges(scores, delta, edges, owners)
    round_up(edges, bounds)
    size = owners.size
    cells = before.size - 1
    span = edges[size] - edges[0]
    cells_per_unit = min(cells / span, LARGEST) if span > 0 else 0.0
    before[:] = 0
    for k in range(size):
        before[cell_of(edges[k + 1], edges[0], cells_per_unit, cells - 1.0) + np.uint32(1)] += np.uint32(1)
    for cell in range(cells):
        before[cell + 1] += before[cell]
    return cells_per_unit


@inlined
def table_parts(g, first, width):
    """Return where the tables of ranking ``g`` begin, and the number of its edges, ``width`` per positive."""
    return width * first[g] + PADDING * g, width * (first[g + 1] - first[g])


@inlined
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


@inlined
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


@inlined
def keep_negatives(logits, targets, numbers):
    """Set the bucket of all entries but negatives to 0, and return whether all input is finite. Vectorised."""
    broken = False
    for j in range(logits.size):
        logit, target = logits[j], targets[j]
        numbers[j] = numbers[j] if target == 0 else np.uint32(0)
        broken |= (not target < 0) & ((logit - logit != 0) | (target - target != 0))
    return not broken


@kernel
def fill_rankings(
    begin,
    end,
    start,
    stop,
    starts,
    first,
    broken,
    logits,
    targets,
    scores,
    delta,
    edges,
    owners,
    bounds,
    before,
    cells_per_unit,
    numbers,
    offset,
    buckets,
):
    """Count the negatives of each bucket, sum their offsets from its lower edge, and find the broken rankings.

    Only the entries of each ranking from ``start`` to ``stop`` are counted. For whole rankings, or if ``stop`` is 0,
    also write the look-up table. Write the bucket of every negative to ``numbers``, and 0 for other entries. Bucket k
    has its count at ``buckets[2 * k]`` and its sum behind it; ``buckets`` leaves out ``offset`` buckets of the call.
    """
    width = 1 if delta == 0 else 2
    one = np.uint64(1)
    for g in range(begin, end):
        low, high = starts[g] + start, min(starts[g] + stop, starts[g + 1])
        at, size = table_parts(g, first, width)
        if broken[g] or size == 0:
            broken[g] |= not all_finite(low, high, logits, targets)
            continue
        g_edges, g_bounds = edges[at : at + size + 2], bounds[at : at + size + PADDING]
        g_before = before[2 * at : 2 * at + CELLS_PER_EDGE * size + 1]
        if start == 0 and (stop == 0 or high == starts[g + 1]):
            g_scores, g_owners = scores[first[g] : first[g + 1]], owners[at : at + size]
            cells_per_unit[g] = look_up_table(g_scores, delta, g_edges, g_owners, g_bounds, g_before)
        g_buckets = buckets[2 * (at - offset) : 2 * (at - offset + size + 1)]
        g_buckets[:] = 0
        for block_start in range(low, high, BLOCK):
            # Indices into a slice count from 0, so numba omits the test for negative ones.
            block = slice(block_start, min(block_start + BLOCK, high))
            s, block_numbers = logits[block], numbers[block]
            find_buckets(s, g_edges[0], g_bounds, g_before, cells_per_unit[g], block_numbers)
            broken[g] |= not keep_negatives(s, targets[block], block_numbers)
            for j in range(s.size):
                k = np.uint64(block_numbers[j])
                # The bound is in the cache. The difference to the edge is corrected below.
                g_buckets[k << one] += 1
                g_buckets[(k << one) + one] += np.float64(s[j]) - np.float64(g_bounds[k])
        g_buckets[:2] = 0  # bucket 0 also holds positives and ignored entries
        for bucket in range(1, size + 1):
            if g_buckets[2 * bucket] > 0:
                g_buckets[2 * bucket + 1] += g_buckets[2 * bucket] * (g_bounds[bucket] - g_edges[bucket])


@inlined
def count_false_positives(edges, owners, buckets, delta, sums):
    """Write FP(i), the sum over negatives j of H(s_j - s_i), for each positive i, from the buckets."""
    count = 0.0  # negatives above the current edge
    if delta == 0:
        for k in range(owners.size, 0, -1):
            count += buckets[2 * k]
            sums[k - 1] = count
        for k in range(1, owners.size):  # tied positives share the sum of the first
            if edges[k + 1] == edges[k]:
                sums[k] = sums[k - 1]
        return
    ramp = 0.0  # their summed distance from the current edge
    covering = 0  # ramps that cover the current bucket
    for k in range(owners.size, 0, -1):
        # No sum depends on a bucket that no ramp covers. Skipping it keeps the numbers small.
        if covering > 0:
            ramp += count * (edges[k + 1] - edges[k]) + buckets[2 * k + 1]
        count += buckets[2 * k]
        owner = owners[k - 1]
        if owner >= 0:
            sums[owner] = (ramp - sums[owner]) / (2 * delta)
            covering -= 1
        else:
            sums[~owner] = ramp
            covering += 1


@kernel
def count_rankings(begin, end, first, broken, delta, edges, owners, buckets, sums):
    """Write FP(i) for the positives of each ranking; 0 if it is broken."""
    width = 1 if delta == 0 else 2
    for g in range(begin, end):
        at, size = table_parts(g, first, width)
        own_sums = sums[first[g] : first[g + 1]]
        if broken[g]:
            own_sums[:] = 0
        elif size > 0:
            g_edges, g_owners = edges[at : at + size + 2], owners[at : at + size]
            count_false_positives(g_edges, g_owners, buckets[2 * at : 2 * (at + size + 1)], delta, own_sums)


@inlined
def gradient_table(edges, owners, weights, delta, table):
    """Express the sum over i of weights_i H(x - s_i) in each bucket as a line over the distance from the lowest edge.

    Bucket k has the line's value at the lowest edge at ``table[2 * k]`` and its slope at ``table[2 * k + 1]``. Two
    numbers save cache, and lose no more digits than the edges s +- delta have lost.
    """
    table[:2] = 0
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
        table[2 * k], table[2 * k + 1] = value - slope * (edges[k] - edges[0]), slope


@kernel
def write_gradients(
    begin,
    end,
    start,
    stop,
    starts,
    first,
    broken,
    logits,
    targets,
    delta,
    edges,
    owners,
    weights,
    tables,
    numbers,
    gradient,
):
    """Write the gradient at the entries of each ranking from ``start`` to ``stop``; NaN in broken rankings.

    For whole rankings, or if ``stop`` is 0, also write the gradient table. ``numbers`` and ``gradient`` may
    share memory.
    """
    one = np.uint64(1)
    width = 1 if delta == 0 else 2
    for g in range(begin, end):
        low, high = starts[g] + start, min(starts[g] + stop, starts[g + 1])
        at, size = table_parts(g, first, width)
        if broken[g]:
            for j in range(low, high):
                gradient[j] = 0.0 if targets[j] < 0 else np.nan
        elif size == 0:
            gradient[low:high] = 0
        else:
            table = tables[2 * at : 2 * (at + size + 1)]
            if start == 0 and (stop == 0 or high == starts[g + 1]):
                own_weights = weights[first[g] : first[g + 1]]
                gradient_table(edges[at : at + size + 2], owners[at : at + size], own_weights, delta, table)
            s, own_numbers, out, lowest = logits[low:high], numbers[low:high], gradient[low:high], edges[at]
            for j in range(s.size):
                k = np.uint64(own_numbers[j]) << one
                # Bucket 0 has gradient 0. It also holds ignored entries, which may be NaN, so there is no product.
                out[j] = table[k] + table[k + one] * (np.float64(s[j]) - lowest) if k > 0 else 0.0


@kernel
def write_own_gradients(first, broken, at, own, gradient):
    """Write the gradient ``own`` at the positives of each ranking that is not broken."""
    for g in range(first.size - 1):
        if not broken[g]:
            for i in range(first[g], first[g + 1]):
                gradient[at[i]] = own[i]


@inlined
def windows(scores, delta, x, low, high):
    """Write x, the scores in units of 2 delta, and for each the window of scores where H is between 0 and 1.

    Gaps in x are clipped to 1, beyond which H is 0 or 1, so x stays small for distant logits too.
    """
    size = scores.size
    origin = scores[0]
    if delta == 0:
        for i in range(size):
            x[i] = scores[i] - origin
            low[i] = high[i] = low[i - 1] if i > 0 and scores[i] == scores[i - 1] else i
        return
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


@kernel
def write_windows(begin, end, first, broken, scores, delta, x, low, high):
    """Write the windows of each ranking. Their members are counted from its first positive."""
    for g in range(begin, end):
        if first[g] < first[g + 1] and not broken[g]:
            own = slice(first[g], first[g + 1])
            windows(scores[own], delta, x[own], low[own], high[own])


@inlined
def sum_above(x, low, high, values, sums, count, ramp):
    """Write the sum over j of h_ij values_j; h_ij is 0 for j < low_i, 1 for j >= high_i, else x_j - x_i + 1/2.

    ``count`` and ``ramp`` are memory for the sum of values from j on, and for the sum of values times their distance
    from x_j. No term of these sums is negative.
    """
    size, columns = values.shape
    count[size] = ramp[size] = 0.0
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


@kernel
def sum_rankings_above(begin, end, first, broken, x, low, high, values, sums):
    """Write the sums of :func:`sum_above` for each ranking; 1 if it is broken."""
    count, ramp = np.empty((2, max_positives(begin, end, first) + 1))
    for g in range(begin, end):
        own = slice(first[g], first[g + 1])
        if broken[g]:
            sums[own] = 1
        elif own.start < own.stop:
            sum_above(x[own], low[own], high[own], values[own], sums[own], count, ramp)


@kernel
def rank_rankings(begin, end, first, broken, scores, delta, edges, owners, buckets, false_positives, ranks):
    """Write FP(i) and rank(i) for the positives of each ranking; 0 and 1 if it is broken.

    On small inputs, calls cost more than arithmetic.
    """
    count_rankings(begin, end, first, broken, delta, edges, owners, buckets, false_positives)
    largest = max_positives(begin, end, first)
    x, count, ramp = np.empty((3, largest + 1))
    low, high = np.empty((2, largest), np.int64)
    ones, sums = np.ones((largest, 1)), ranks.reshape(-1, 1)
    for g in range(begin, end):
        own, some = slice(first[g], first[g + 1]), slice(0, first[g + 1] - first[g])
        if broken[g]:
            ranks[own] = 1
        elif own.start < own.stop:
            windows(scores[own], delta, x[some], low[some], high[some])
            sum_above(x[some], low[some], high[some], ones[some], sums[own], count, ramp)
            for i in range(first[g], first[g + 1]):
                ranks[i] += false_positives[i]


@kernel
def mean_rankings(first, broken, errors, means):
    """Write the mean over the positives of each ranking; NaN if it is broken, 0 without positives."""
    for g in range(first.size - 1):
        total = 0.0
        for start in range(first[g], first[g + 1], SUMMED):
            part = 0.0  # sums of few numbers round less
            for i in range(start, min(start + SUMMED, first[g + 1])):
                part += errors[i]
            total += part
        means[g] = np.nan if broken[g] else total / max(1, first[g + 1] - first[g])


@kernel
def running_minima(first, values, minima):
    """Write the minimum of ``values`` from the first positive of its ranking up to each positive."""
    for g in range(first.size - 1):
        minimum = np.inf
        for i in range(first[g], first[g + 1]):
            minimum = min(minimum, values[i])
            minima[i] = minimum


@kernel
def sum_rankings_below(first, scores, values, sums):
    """Write the sum of ``values`` over the positives of the same ranking with an equal or lower score."""
    for g in range(first.size - 1):
        total = 0.0
        start = first[g]
        while start < first[g + 1]:
            stop = start
            while stop < first[g + 1] and scores[stop] == scores[start]:
                total += values[stop]
                stop += 1
            stop = max(stop, start + 1)  # NaN does not equal itself
            sums[start:stop] = total
            start = stop


@inlined
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


@inlined
def sum_above_worse(start, stop, x, low, high, order, labels, values, sums, tree):
    """Write the sum of :func:`sum_above` over only the j with a lower label than i, for i in ``order[start:stop]``.

    ``order`` sorts the labels. Positives enter a Fenwick tree over the score order by ascending label. ``values`` has
    exactly two columns, because additions without a loop over columns are vectorised. ``tree`` is its memory, for sums
    of values and of values times x; node size - j is positive j.
    """
    size = np.uint64(x.size)
    while 0 < start < x.size and labels[order[start]] == labels[order[start - 1]]:
        start += 1  # equal labels stay in one part
    while 0 < stop < x.size and labels[order[stop]] == labels[order[stop - 1]]:
        stop += 1
    tree[: x.size + 1] = 0
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


@kernel
def sum_rankings_above_worse(begin, end, start, stop, first, broken, x, low, high, order, labels, values, sums):
    """Write the sums of :func:`sum_above_worse` for the positives ``order[start:stop]`` of each ranking.

    They are 0 if it is broken.
    """
    tree = np.empty((max_positives(begin, end, first) + 1, 4))
    for g in range(begin, end):
        own = slice(first[g], first[g + 1])
        if broken[g]:
            sums[own] = 0
        elif own.start < own.stop:
            last = min(stop, first[g + 1] - first[g])
            arrays = x[own], low[own], high[own], order[own], labels[own], values[own], sums[own]
            sum_above_worse(start, last, *arrays, tree)
