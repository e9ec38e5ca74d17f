"""Exact bucketing in torch operations: the definition's numbers for every delta, in O((P + N) log P). Any device.

The bounds of the buckets are the edges of the ramps, ``s_i - delta`` and ``s_i + delta``. Between two neighbouring
edges every ``H(. - s_i)`` is linear, so the count and the sum of a bucket's members give their exact contribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from bucketrank.losses.comparison import Array, TorchComparison, can_place_edges, on_host, precise
from bucketrank.losses.dominance import sums_before, sums_in_matrix
from bucketrank.losses.look_up import LookUp

# Logits per block, which bounds the memory. Every block costs a GPU about twenty kernel launches, so its blocks are
# large; a CPU keeps the intermediate results of a smaller block in its caches.
BLOCK = 1 << 20
BLOCK_ON_CPU = 1 << 18
# Positives up to which they are compared with each other in a matrix, and comparisons per chunk of it. The tree costs a
# GPU a thousand launches. On a CPU the two take the same time at this number of positives.
MOST_IN_MATRIX = 1 << 12
MOST_IN_MATRIX_ON_CPU = 1 << 9
CHUNK = 1 << 22
CHUNK_ON_CPU = 1 << 15


class Exact(TorchComparison):
    """Sorts the positives and their edges, and looks up the bucket of each negative."""

    has_edges = True
    # The memory of the gradient, which holds the bucket of every negative; None once it has been returned.
    gradient: Tensor | None = None

    def is_accurate(self) -> bool:
        if self.delta == 0 or self.scores.numel() == 0:
            return True
        # On a device the host waits for this number: once per call.
        return can_place_edges(self.scores.abs().amax().item(), self.delta, self.scores.dtype)

    def false_positives(self) -> Array:
        edges, lower, upper = self._edges
        counts = torch.zeros(edges.numel() + 1, dtype=torch.int64, device=edges.device)
        # Integers: their sum has the same bits in any order. The order of atomic additions on a GPU changes, and with
        # it the sum of floats.
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
        # The first row is for bucket 0, below the lowest edge, where the gradient is zero.
        table = torch.cat([edges.new_zeros(1, 2), torch.stack([value, slope], 1)])
        gradient, self.gradient = self.gradient, None
        # Already returned by an earlier backward pass, or there was no forward pass.
        find = gradient is None
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
            # With the signs turned, "below and better" becomes "above and worse".
            return sums_in_matrix(-self.scores, self.delta, -self.labels, values[:, None], self._chunk)[:, 0]
        # In the reversed list, "below and better" becomes "above and worse".
        x, low, high = _windows(-self.scores.flip(0), self.delta)
        return sums_before(x, low, high, -self.labels.flip(0), values.flip(0)[:, None])[:, 0].flip(0)

    @property
    def _in_matrix(self) -> bool:
        positives: int = self.scores.numel()
        return positives <= (MOST_IN_MATRIX_ON_CPU if on_host(self.scores) else MOST_IN_MATRIX)

    @property
    def _chunk(self) -> int:
        return CHUNK_ON_CPU if on_host(self.scores) else CHUNK

    @cached_property
    def _edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all edges, ascending, and the positions of each positive's lower and upper edge among them."""
        rows = torch.arange(self.scores.numel(), device=self.scores.device)
        if self.delta == 0:
            return self.scores, torch.searchsorted(self.scores, self.scores), rows
        low, high = self.scores - self.delta, self.scores + self.delta
        lower, upper = rows + torch.searchsorted(high, low), rows + torch.searchsorted(low, high, right=True)
        edges = torch.empty(2 * rows.numel(), dtype=low.dtype, device=low.device)
        edges[lower], edges[upper] = low, high
        return edges, lower, upper

    def _widths(self, edges: Tensor) -> Tensor:
        """Return the widths of the buckets in units of 2 delta, cut to 1: beyond that every H is 0 or 1."""
        return (torch.diff(edges, append=edges[-1:]) / (2 * self.delta)).clamp_(max=1)

    def _in_buckets(self, edges: Tensor, gradient: Tensor, *, find: bool) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks of logits with their buckets and their offsets from the lower edges in units of 2 delta.

        Bucket 0 lies below the lowest edge; it also holds positives and ignored entries. The buckets are stored in the
        memory of ``gradient``: they are written there if ``find`` is true, else they are there already.
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
                # One launch: a GPU hides the memory reads that slow this search down on a CPU.
                bucket.copy_(torch.searchsorted(edges, negatives, right=True))
            offset = negatives.sub_(lower.index_select(0, bucket))
            yield block, bucket, offset.div_(2 * self.delta or 1).clamp_(0, 1)

    @cached_property
    def _windows(self) -> tuple[Tensor, Tensor, Tensor]:
        return _windows(self.scores, self.delta)


def _windows(scores: Tensor, delta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, the positives in units of 2 delta, and the window of each, whose members have an H between 0 and 1.

    Gaps in x are cut to 1, since H is 0 or 1 beyond: x stays small however far apart the logits are.
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
    """Add the number of members of each bucket to ``counts``."""
    if on_host(counts):
        counts += torch.bincount(bucket, minlength=counts.numel())
    else:  # bincount would wait for the device
        counts.index_add_(0, bucket, counts.new_ones(1).expand_as(bucket))
