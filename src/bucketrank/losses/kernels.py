"""The compiled loops behind ``fused.py``, in plain Python for numba.

All release the GIL, so that parts of one call run on several threads. Compiled on first use and cached on disk.
Indices into the look-up table are unsigned, which spares numba the test for negative ones.
"""

import numpy as np
from numba import njit

# Cells of the look-up table for each edge: enough that few cells hold more than WINDOW edges.
CELLS_PER_EDGE = 2
# Edges past the ones in earlier cells that two comparisons tell apart.
WINDOW = 3
# Edges in one cell up to which walking beats halving.
WALK = 8
# Logits looked up together.
BLOCK = 1024


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
def round_up(edges, logits):
    """The edges as the least numbers of the logits' type at or above them: the same buckets, found in fewer bytes.

    Behind the last, NaN: it is at or below nothing, so comparisons may run over the end.
    """
    bounds = np.full(edges.size + WINDOW - 1, np.nan, logits.dtype)
    for k in range(edges.size - 1):
        bounds[k] = edges[k]
        if bounds[k] < edges[k]:
            bounds[k] = np.nextafter(bounds[k], bounds.dtype.type(np.inf))
    return bounds


@kernel
def look_up_table(scores, delta, logits):
    """The edges and their owners, and what finds the bucket of a logit.

    That is: the edges as :func:`round_up` has them, how many of them come before each of the equal cells over their
    range, and cells per unit.
    """
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
    return edges, owners, round_up(edges, logits), before, cells_per_unit


@kernel
def search_bounds(x, bounds, low, high):
    """How many edges are at or below ``x``, known to be ``low`` to ``high``."""
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
def find_buckets(logits, low, bounds, before, cells_per_unit, found):
    """For each logit, how many edges are at or below it, into ``found``.

    In stages: within one, no logit waits for another, so the processor fetches many parts of the tables at a time.
    """
    last = before.size - 2.0
    one, two = np.uint32(1), np.uint32(2)
    for j in range(logits.size):
        found[j] = cell_of(np.float64(logits[j]), low, cells_per_unit, last)
    for j in range(logits.size):
        found[j] = before[found[j]]
    for j in range(logits.size):
        k = below = found[j]
        x = logits[j]
        # No branch depends on x: the processor need not guess.
        k += np.uint32(bounds[k + two] <= x) * two
        k += np.uint32(bounds[k + one] <= x)
        if k - below == WINDOW:  # rarely
            cell = cell_of(np.float64(x), low, cells_per_unit, last)
            k = np.uint32(search_bounds(x, bounds, np.int64(k), np.int64(before[cell + one])))
        found[j] = k


@kernel
def keep_negatives(logits, targets, found):
    """Put 0 into ``found`` for all but negatives; whether all that takes part is finite. In vector registers."""
    broken = False
    for j in range(logits.size):
        logit, target = logits[j], targets[j]
        found[j] = found[j] if target == 0 else np.uint32(0)
        broken |= (not target < 0) & ((logit - logit != 0) | (target - target != 0))
    return not broken


@kernel
def fill_buckets(start, stop, logits, targets, edges, bounds, before, cells_per_unit, found):
    """Per bucket: how many of these negatives it holds, and their offsets from its lower edge, summed.

    Also leaves the bucket of every negative in ``found``, there 0 for all else, and tells whether all that takes part
    is finite.
    """
    flat = np.zeros(2 * (edges.size - 1))
    one = np.uint64(1)
    finite = True
    for first in range(start, stop, BLOCK):
        # Slices, as numba tests no index for being negative that counts from 0.
        block = slice(first, min(first + BLOCK, stop))
        s, here = logits[block], found[block]
        find_buckets(s, edges[0], bounds, before, cells_per_unit, here)
        finite &= keep_negatives(s, targets[block], here)
        for j in range(s.size):
            k = np.uint64(here[j])
            # From the bound, which has just been fetched.
            offset = np.float64(s[j]) - np.float64(bounds[k])
            flat[k << one] += 1
            flat[(k << one) + one] += offset
    buckets = flat.reshape(-1, 2)
    buckets[0] = 0  # with the negatives below all edges, which matter to none, what is no negative
    for bucket in range(1, edges.size - 1):
        if buckets[bucket, 0] > 0:
            buckets[bucket, 1] += buckets[bucket, 0] * (bounds[bucket] - edges[bucket])
    return buckets, finite


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
    """Per bucket: sum over i of weights_i H(. - s_i), as a straight line over the distance from the lowest edge.

    Its value there, and its slope. Two numbers and no more, so that more rows stay in the caches; no more digits are
    lost than the edges themselves, s +- delta, have lost.
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
            if covering == 0:  # without what rounding left of it: the bucket may be very wide
                slope = 0.0
        table[k, 0], table[k, 1] = value - slope * (edges[k] - edges[0]), slope
    return table


@kernel
def write_gradient(start, stop, logits, low, table, found, gradient):
    """The gradient at these entries, read off the table; ``found`` may be the same memory as ``gradient``."""
    s, here, out = logits[start:stop], found[start:stop], gradient[start:stop]
    for j in range(s.size):
        k = here[j]
        # Nothing but zeros below all edges; what is no negative has been put there, and may be NaN.
        out[j] = table[k, 0] + table[k, 1] * (np.float64(s[j]) - low) if k > 0 else 0.0


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
def average_precision(scores, edges, owners, buckets, delta):
    """AP loss, and the two vectors of its ``Terms``."""
    false_positives = count_false_positives(edges, owners, buckets, delta)
    positives = scores.size
    x, low, high = windows(scores, delta)
    above = sum_above(x, low, high, np.ones((positives, 1)))
    weights, own = np.empty(positives), np.empty(positives)
    loss = 0.0
    for i in range(positives):
        rank = above[i, 0] + false_positives[i]
        error = false_positives[i] / rank
        loss += error
        weights[i], own[i] = 1 / rank / positives, (0 - error) / positives
    return loss / positives, weights, own


@kernel
def sum_down(tree, node, end):
    """The four sums along the nodes that lead down from ``node``, and the first of them at or below ``end``."""
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
    """The same over only the j with a lower label than i, for the i at ``order[start:stop]``; ``order`` sorts labels.

    A Fenwick tree over the positives in order of score, into which they are entered by ascending label. Two columns of
    values, no more nor fewer: written out, they are added in vector registers.
    """
    size = np.uint64(x.size)
    while 0 < start < x.size and labels[order[start]] == labels[order[start - 1]]:
        start += 1  # equal labels are answered together, by whoever has the first
    while 0 < stop < x.size and labels[order[stop]] == labels[order[stop - 1]]:
        stop += 1
    tree = np.zeros((x.size + 1, 4))  # of values, and of values times x; node size - j stands for positive j
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
        for k in range(begin, end):  # equal labels are not worse: ask for all of them, then enter them
            i = np.uint64(order[k])
            a, b = size - np.uint64(low[i]), size - np.uint64(high[i])
            # Inside the window: all up to a, less all up to b. The two ways down meet.
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
