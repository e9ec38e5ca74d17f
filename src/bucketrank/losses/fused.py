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
FEWEST_POSITIVES = 1 << 11


class Fused(Exact):
    """The same numbers as :class:`Exact`, from the loops of ``kernels.py``."""

    xp: Any = np

    def __init__(self, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None) -> None:
        self.delta = delta
        self.entries = s, t = logits.detach().numpy(), targets.numpy()
        if index is None:
            self.at = np.flatnonzero(t > 0)
            self.at = self.at[s[self.at].astype(np.float64).argsort()]
        else:
            self.at = index.numpy()
        self.index = torch.from_numpy(self.at)
        self.scores = s[self.at].astype(np.float64)
        if index is None:
            self.finite = self._fill()

    @cached_property
    def labels(self) -> Array:
        return self.entries[1][self.at].astype(np.float64)

    @cached_property
    def look_up(self) -> tuple[Array, Array, tuple[Array, float]]:
        """Edges and their owners, and the table that finds the bucket of a logit."""
        edges, owners, *table = kernels.look_up_table(self.scores, self.delta)
        return edges, owners, tuple(table)

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
        if not -np.inf < self.scores[0] <= self.scores[-1] < np.inf:
            return False
        edges, _, table = self.look_up
        (self.buckets, finite), *parts = in_parts(
            lambda start, stop: kernels.fill_buckets(start, stop, s, t, edges, *table), t.size
        )
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
        edges, owners, _ = self.look_up
        return kernels.count_false_positives(edges, owners, self.buckets, self.delta)

    def spread(self, weights: Array, own: Array) -> Tensor:
        s, t = self.entries
        edges, owners, table = self.look_up
        rows = kernels.gradient_table(edges, owners, weights, self.delta)
        gradient = np.empty_like(s)
        in_parts(
            lambda start, stop: kernels.write_gradient(start, stop, s, t, edges, *table, rows, gradient), gradient.size
        )
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
