"""Exact bucketing on CPU tensors with compiled loops: one pass over the logits forward, one backward."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bucketrank.losses import kernels
from bucketrank.losses.comparison import Array
from bucketrank.losses.exact import Exact
from bucketrank.losses.threads import in_parts

# The smallest share of a thread in the sums over positives, each worth hundreds of negatives.
FEWEST_POSITIVES = 1 << 13
# Up to this many logits it is quicker to keep their buckets than to find them twice; beyond, memory is slower.
MOST_KEPT = 1 << 22


class Fused(Exact):
    """The same numbers as :class:`Exact`, from the loops of ``kernels.py``."""

    xp: Any = np
    # The bucket of every logit, kept from the forward to the backward pass; empty if it is to be found again.
    found: Array = np.empty(0, np.uint32)

    def __init__(self, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None) -> None:
        self.delta = delta
        self.entries = s, t = logits.detach().numpy(), targets.numpy()
        self.at = (t > 0).nonzero()[0] if index is None else index.numpy()
        self.scores = s[self.at].astype(np.float64)
        if index is None:
            order = self.scores.argsort()
            self.at, self.scores = self.at[order], self.scores[order]
        if self.at.size and -np.inf < self.scores[0] <= self.scores[-1] < np.inf:
            # Edges and their owners, and the table that finds the bucket of a logit.
            self.edges, self.owners, *self.table = kernels.look_up_table(self.scores, delta)
        if index is None:
            self.finite = self._fill()

    @property
    def index(self) -> Tensor:
        return torch.from_numpy(self.at)

    @cached_property
    def labels(self) -> Array:
        return self.entries[1][self.at].astype(np.float64)

    @cached_property
    def windows(self) -> tuple[Array, Array, Array]:
        """See :func:`kernels.windows`."""
        x, low, high = kernels.windows(self.scores, self.delta)
        return x, low, high

    def _fill(self) -> bool:
        """Fill the buckets, and tell whether all that takes part is finite."""
        s, t = self.entries
        if not self.at.size:
            return all(in_parts(lambda start, stop: kernels.all_finite(start, stop, s, t), t.size))
        if not hasattr(self, "edges"):
            return False
        if t.size <= MOST_KEPT:
            self.found = np.empty(t.size, np.uint32)
        given = s, t, self.edges, *self.table, self.found
        (self.buckets, finite), *parts = in_parts(lambda start, stop: kernels.fill_buckets(start, stop, *given), t.size)
        for buckets, also_finite in parts:
            self.buckets += buckets
            finite &= also_finite
        return bool(finite)

    def vector(self, values: Tensor) -> Array:
        return values.numpy().astype(np.float64, copy=False)

    def scalar(self, value: Array) -> Tensor:
        return torch.from_numpy(np.asarray(value, self.entries[0].dtype))

    def running_minimum(self, values: Array) -> Array:
        return np.minimum.accumulate(values)

    def false_positives(self) -> Array:
        return kernels.count_false_positives(self.edges, self.owners, self.buckets, self.delta)

    def spread(self, weights: Array, own: Array) -> Tensor:
        s, t = self.entries
        rows = kernels.gradient_table(self.edges, self.owners, weights, self.delta)
        gradient = np.empty_like(s)
        given = s, t, self.edges, *self.table, self.found, rows, gradient
        in_parts(lambda start, stop: kernels.write_gradient(start, stop, *given), gradient.size)
        gradient[self.at] = own
        return torch.from_numpy(gradient)

    def above(self, values: Array) -> Array:
        return kernels.sum_above(*self.windows, values)

    def above_worse(self, values: Array) -> Array:
        return _above_worse(self.windows, self.labels, values)

    def below_better(self, values: Array) -> Array:
        # Seen from the other end of the list, "below and better" is "above and worse". Copies, as numba would
        # compile its loops once more for arrays that run backwards.
        windows = kernels.windows(-self.scores[::-1], self.delta)
        return _above_worse(windows, -self.labels[::-1], values[::-1, None].copy())[::-1, 0]


def _above_worse(windows: tuple[Array, Array, Array], labels: Array, values: Array) -> Array:
    sums = np.empty_like(values)
    order = labels.argsort()
    in_parts(
        lambda start, stop: kernels.sum_above_worse(start, stop, *windows, order, labels, values, sums),
        labels.size,
        FEWEST_POSITIVES,
    )
    return sums
