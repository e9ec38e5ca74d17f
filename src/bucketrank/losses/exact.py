"""Exact bucketing in torch operations: the definition's numbers for every delta, in O((P + N) log P), on any device.

The bucket edges are the ends of the ramps, ``s_i - delta`` and ``s_i + delta``. Between two neighbouring edges every
``H(. - s_i)`` is linear, so the member count and sum of a bucket give its exact contribution. :class:`LookUp` finds the
bucket of each negative. :func:`sums_before` and :func:`sums_in_matrix` compare positives with positives for the sorting
term of RS loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from bucketrank.losses.comparison import Array, TorchComparison, can_place_edges, on_host, precise, step_

# Logits per block, which bounds the memory. A block takes about twenty kernel launches, so a GPU gets large blocks. A
# CPU keeps the intermediate results of a smaller block in cache.
BLOCK = 1 << 20
BLOCK_ON_CPU = 1 << 18
# Maximum positives compared in a matrix instead of a tree, and comparisons per matrix chunk. The
# tree takes a thousand launches. On a CPU both take the same time at this number of positives.
MAX_IN_MATRIX = 1 << 12
MAX_IN_MATRIX_ON_CPU = 1 << 9
CHUNK = 1 << 22
CHUNK_ON_CPU = 1 << 15
# Look-up cells per edge: enough that the binary search inside a cell mostly takes three or four steps.
CELLS_PER_EDGE = 2
# float32, the widest float on some devices, holds every integer only up to this number.
MAX_CELLS = 1 << 24


class Exact(TorchComparison):
    """Exact bucketing of one ranking in torch operations."""

    has_edges = True
    # Memory for the gradient. Until the backward pass returns it, it holds the bucket of every negative.
    gradient: Tensor | None = None

    def is_accurate(self) -> bool:
        if self.delta == 0 or self.scores.numel() == 0:
            return True
        # One device sync per call.
        return can_place_edges(self.scores.abs().amax().item(), self.delta, self.scores.dtype)

    def false_positives(self) -> Array:
        edges, lower, upper = self._edges
        counts = torch.zeros(edges.numel() + 1, dtype=torch.int64, device=edges.device)
        # Fixed point: sums of integers do not depend on the order of atomic additions on a GPU, sums of floats do.
        unit = 2.0 ** (61 - self.logits.numel().bit_length())
        totals = torch.zeros_like(counts)
        self.gradient = torch.empty_like(self.logits)
        for _, bucket, offset in self._in_buckets(edges, self.gradient, find=True):
            _count_(counts, bucket)
            if self.delta > 0:
                totals.index_add_(0, bucket, offset.mul_(unit).to(torch.int64))
        reached = _suffix_sums(precise(counts[1:]))  # negatives at or above each edge
        if self.delta == 0:
            return reached[lower]
        ramps = _suffix_sums(
            precise(totals[1:]) / unit + self._widths(edges) * torch.cat([reached[1:], reached.new_zeros(1)])
        )
        return ramps[lower] - ramps[upper]

    def spread(self, weights: Array, own: Array) -> Tensor:
        edges, lower, upper = self._edges
        slope = torch.zeros_like(edges)
        if self.delta == 0:
            value = torch.zeros_like(edges).index_add_(0, lower, weights).cumsum(0)
        else:
            slope = slope.index_add_(0, lower, weights).index_add_(0, upper, -weights).cumsum(0)
            value = torch.cat([slope.new_zeros(1), (slope * self._widths(edges))[:-1].cumsum(0)])
        # Row 0 belongs to bucket 0, below the lowest edge, where the gradient is zero.
        table = torch.cat([edges.new_zeros(1, 2), torch.stack([value, slope], 1)])
        gradient, self.gradient = self.gradient, None
        find = gradient is None  # already returned by an earlier backward pass
        if gradient is None:
            gradient = torch.empty_like(self.logits)
        for block, bucket, offset in self._in_buckets(edges, gradient, find=find):
            value, slope = table.index_select(0, bucket).unbind(1)
            gradient[block] = torch.addcmul(value, slope, offset)
        return gradient.index_copy_(0, self.index, own.to(gradient.dtype))

    def above(self, values: Array) -> Array:
        x, low, high = self._windows
        sums = _suffix_sums(values)
        if self.delta == 0:
            return sums[low]
        # ramps_k = sum over j >= k of values_j (x_j - x_k): no term is negative, so no digits are lost.
        gaps = torch.diff(x, append=x[-1:])[:, None]
        ramps = _suffix_sums(gaps * torch.cat([sums[1:], sums.new_zeros(1, sums.shape[1])]))
        sums, ramps = (torch.cat([part, part.new_zeros(1, part.shape[1])]) for part in (sums, ramps))
        ends = torch.cat([x, x[-1:]])[:, None]
        x = x[:, None]
        return ramps[low] + sums[low] * (ends[low] - x + 0.5) - ramps[high] - sums[high] * (ends[high] - x - 0.5)

    def above_worse(self, values: Array) -> Array:
        if self._in_matrix:
            return sums_in_matrix(self.scores, self.delta, self.labels, values, self._chunk)
        x, low, high = self._windows
        return sums_before(x, low, high, self.labels, values)

    def below_better(self, values: Array) -> Array:
        if self._in_matrix:
            # Negating scores and labels turns "below and better" into "above and worse".
            return sums_in_matrix(-self.scores, self.delta, -self.labels, values[:, None], self._chunk)[:, 0]
        # Reversing the list turns "below and better" into "above and worse".
        x, low, high = _windows(-self.scores.flip(0), self.delta)
        return sums_before(x, low, high, -self.labels.flip(0), values.flip(0)[:, None])[:, 0].flip(0)

    @property
    def _in_matrix(self) -> bool:
        positives: int = self.scores.numel()
        return positives <= (MAX_IN_MATRIX_ON_CPU if on_host(self.scores) else MAX_IN_MATRIX)

    @property
    def _chunk(self) -> int:
        return CHUNK_ON_CPU if on_host(self.scores) else CHUNK

    @cached_property
    def _edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """All edges in ascending order, and the positions of each positive's lower and upper edge."""
        rows = torch.arange(self.scores.numel(), device=self.scores.device)
        if self.delta == 0:
            return self.scores, torch.searchsorted(self.scores, self.scores), rows
        low, high = self.scores - self.delta, self.scores + self.delta
        lower, upper = rows + torch.searchsorted(high, low), rows + torch.searchsorted(low, high, right=True)
        edges = torch.empty(2 * rows.numel(), dtype=low.dtype, device=low.device)
        edges[lower], edges[upper] = low, high
        return edges, lower, upper

    def _widths(self, edges: Tensor) -> Tensor:
        """Return the bucket widths in units of 2 delta, clipped to 1, beyond which every H is 0 or 1."""
        return (torch.diff(edges, append=edges[-1:]) / (2 * self.delta)).clamp_(max=1)

    def _in_buckets(self, edges: Tensor, gradient: Tensor, *, find: bool) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks of logits with their buckets and their offsets from the lower edges in units of 2 delta.

        Bucket 0 lies below the lowest edge; it also holds positives and ignored entries. The buckets are stored in the
        memory of ``gradient``. They are looked up if ``find`` is true, and otherwise read from there.
        """
        host = on_host(edges)
        look_up = LookUp(edges) if find and host else None
        buckets = gradient.view(torch.int32 if gradient.element_size() == 4 else torch.int64)
        lower = torch.cat([edges[:1], edges])
        size = BLOCK_ON_CPU if host else BLOCK
        for start in range(0, buckets.numel(), size):
            block = slice(start, start + size)
            negatives = precise(self.logits[block]).masked_fill(self.targets[block] != 0, -torch.inf)
            bucket = buckets[block]
            if look_up is not None:
                bucket.copy_(look_up(negatives))
            elif find:
                # A single launch. A GPU hides the memory latency that slows this search down on a CPU.
                bucket.copy_(torch.searchsorted(edges, negatives, right=True))
            offset = negatives.sub_(lower.index_select(0, bucket))
            yield block, bucket, offset.div_(2 * self.delta or 1).clamp_(0, 1)

    @cached_property
    def _windows(self) -> tuple[Tensor, Tensor, Tensor]:
        return _windows(self.scores, self.delta)


def _windows(scores: Tensor, delta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the scores in units of 2 delta, and for each the window of scores where H is between 0 and 1.

    Gaps in x are clipped to 1, beyond which H is 0 or 1, so x stays small for distant logits too.
    """
    if delta == 0:
        low = torch.searchsorted(scores, scores)
        return scores, low, low
    excess = (torch.diff(scores, prepend=scores[:1]) - 2 * delta).clamp_(min=0)
    x = (scores - scores[0] - excess.cumsum(0)) / (2 * delta)
    return x, torch.searchsorted(x, x - 0.5, right=True), torch.searchsorted(x, x + 0.5)


def _suffix_sums(values: Tensor) -> Tensor:
    return values.flip(0).cumsum(0).flip(0)


def _count_(counts: Tensor, bucket: Tensor) -> None:
    if on_host(counts):
        counts += torch.bincount(bucket, minlength=counts.numel())
    else:  # bincount would cause a device sync
        counts.index_add_(0, bucket, counts.new_ones(1).expand_as(bucket))


class LookUp:
    """Computes ``torch.searchsorted(edges, numbers, right=True)`` as int32, for numbers that are not NaN.

    Equal cells divide the range of the edges. The cell of a number gives the edges below the cell, and a binary search
    among the edges of that cell gives the rest. All numbers take the same few steps together, whereas a binary search
    among all edges would read distant memory for each number.
    """

    def __init__(self, edges: Tensor) -> None:
        self.last = min(CELLS_PER_EDGE * edges.numel(), MAX_CELLS) - 1
        self.low = edges[0]
        # Positive and finite even if all edges are equal or their range overflows.
        limits = torch.finfo(edges.dtype)
        self.cells_per_unit = ((self.last + 1) / (edges[-1] - edges[0])).clamp(limits.tiny, limits.max)
        members = torch.bincount(self._cell(edges), minlength=self.last + 1)
        self.before = (members.cumsum(0) - members).int()
        self.steps = int(members.max()).bit_length()
        # The search may read past the last edge, where ``nan <= x`` is false for every x.
        self.edges = torch.cat([edges, edges.new_full((1 << self.steps,), torch.nan)])

    def __call__(self, numbers: Tensor) -> Tensor:
        bucket = self.before.index_select(0, self._cell(numbers))
        for step in reversed(range(self.steps)):
            half = 1 << step
            bucket.add_(self.edges[half - 1 :].index_select(0, bucket) <= numbers, alpha=half)
        return bucket

    def _cell(self, numbers: Tensor) -> Tensor:
        """Return a valid cell for each number. Rounding keeps the order of the numbers."""
        return numbers.sub(self.low).mul_(self.cells_per_unit).clamp_(0, self.last).int()


def sums_before(x: Tensor, low: Tensor, high: Tensor, labels: Tensor, values: Tensor) -> Tensor:
    """Return the sum over j with labels_j < labels_i of values_j h_ij, for each i; ``values`` is (P, K).

    ``x`` is ascending; ``h_ij`` is 0 for j < low_i, 1 for j >= high_i and x_j - x_i + 1/2 in between. It takes
    O(P log P) without a P x P matrix, in about fifty operations per doubling of P.

    A wavelet tree halves the positives, ordered by label, again and again, and keeps each half in score order. The
    positives below a label are a prefix of the label order, which consists of at most one half per level. In each half
    the positives above a score are a suffix, whose sum is the difference of two cumulative sums.
    """
    size = x.numel()
    by_label = labels.argsort(stable=True)
    label_rank = torch.empty_like(by_label)  # positions in label order
    label_rank[by_label] = torch.arange(size, device=x.device)
    prefix = torch.searchsorted(labels[by_label], labels)  # number of positives with a lower label

    # x = cell + fraction. Sums of fractions do not grow with x, so their differences keep their digits.
    cell = x.floor()
    first = (x - 0.5).floor()
    middle = torch.searchsorted(cell, first + 1).clamp(low, high)
    columns = torch.cat([values, values * (x - cell)[:, None]], 1)
    cuts = torch.stack([low, middle, high])  # (3, P) positions in score order, then inside ever smaller halves

    sums = values.new_zeros(3, size, columns.shape[1])  # suffix sums from each of the three cuts
    position = torch.arange(size, device=x.device)
    order = position  # the positives as this level of the tree orders them
    for level in reversed(range((size - 1).bit_length())):
        half = 1 << level
        label_ranks = label_rank.index_select(0, order)
        goes_right = (label_ranks >> level & 1).bool()
        # Members of left halves before each position.
        lefts = torch.cat([label_ranks.new_zeros(1), (~goes_right).cumsum(0)])

        start = _node_start(label_ranks, level)
        inside = lefts[:-1] - lefts.index_select(0, start)
        order = torch.empty_like(order).index_copy_(
            0, torch.where(goes_right, position - inside + half, start + inside), order
        )

        cumulative = torch.cat([columns.new_zeros(1, columns.shape[1]), columns.index_select(0, order).cumsum(0)])
        start = _node_start(prefix, level)
        end = (start + half).clamp_(max=size)
        inside = lefts.index_select(0, cuts.view(-1)).view_as(cuts) - lefts.index_select(0, start)
        # A prefix that ends in the right half contains the whole left half, which is added from the cut to its end. A
        # prefix that ends in the left half adds an empty sum, from the end to the end.
        goes_right = (prefix >> level & 1).bool()
        cuts_inside = torch.where(goes_right, start + inside, end).view(-1)
        sums += cumulative.index_select(0, end) - cumulative.index_select(0, cuts_inside).view_as(sums)
        cuts = torch.where(goes_right, cuts - inside + half, start + inside)

    plain, fractions = sums.chunk(2, dim=2)
    offset = (first - x + 0.5)[:, None]
    ramp = (fractions[0] - fractions[2]) + offset * (plain[0] - plain[2]) + (plain[1] - plain[2])
    return ramp + plain[2]


def _node_start(label_rank: Tensor, level: int) -> Tensor:
    """Return the first position of the node that contains ``label_rank`` and is halved at ``level``."""
    return label_rank >> (level + 1) << (level + 1)


def sums_in_matrix(scores: Tensor, delta: float, labels: Tensor, values: Tensor, chunk: int) -> Tensor:
    """Return the sum over j with labels_j < labels_i of H(s_j - s_i) values_j, for each i; ``values`` is (P, K).

    It takes O(P^2) in eight operations per chunk of ``chunk`` comparisons, which is faster than :func:`sums_before` for
    up to a few thousand positives.
    """
    rows = max(1, chunk // scores.numel())
    sums = []
    for start in range(0, scores.numel(), rows):
        block = slice(start, start + rows)
        compared = step_(scores - scores[block, None], delta).mul_(labels < labels[block, None])
        sums.append(compared @ values)
    return sums[0] if len(sums) == 1 else torch.cat(sums)
