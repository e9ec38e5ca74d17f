"""Exact bucketing on CPU tensors with compiled loops: one pass over the logits forward, one backward.

The forward pass leaves the bucket of every negative in what is to become the gradient, and the backward pass writes
over it: no bucket is found twice, and none needs memory of its own.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bucketrank.losses import kernels
from bucketrank.losses.comparison import Array
from bucketrank.losses.exact import Exact
from bucketrank.losses.terms import Terms, average_precision
from bucketrank.losses.threads import in_parts

# The smallest share of a thread in the sums over positives, each worth hundreds of negatives.
FEWEST_POSITIVES = 1 << 13


class Fused(Exact):
    """The same numbers as :class:`Exact`, from the loops of ``kernels.py``."""

    xp: Any = np

    def __init__(self, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None) -> None:
        self.delta = delta
        self.entries = s, t = logits.detach().numpy(), targets.numpy()
        self.at = _positives(t) if index is None else index.numpy()
        self.scores = s[self.at].astype(np.float64)
        if index is None:
            order = self.scores.argsort()
            self.at, self.scores = self.at[order], self.scores[order]
        if not self.at.size:
            self.finite = all(in_parts(lambda start, stop: kernels.all_finite(start, stop, s, t), t.size))
            return
        self.finite = -np.inf < self.scores.item(0) <= self.scores.item(-1) < np.inf
        if self.finite:
            # Edges and their owners, and the tables that find the bucket of a logit.
            self.edges, self.owners, *self.tables = kernels.look_up_table(self.scores, delta, s)
        if self.finite and index is None:
            self.kept = np.empty_like(s)
            self.finite = self._fill(self.kept)

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

    def _fill(self, gradient: Array) -> bool:
        """Fill the buckets, keep those of the negatives in the memory of ``gradient``, tell whether all is finite."""
        given = *self.entries, self.edges, *self.tables, _buckets_in(gradient)
        (self.buckets, finite), *parts = in_parts(
            lambda start, stop: kernels.fill_buckets(start, stop, *given), gradient.size
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
        return kernels.count_false_positives(self.edges, self.owners, self.buckets, self.delta)

    def spread(self, weights: Array, own: Array) -> Tensor:
        gradient = self.__dict__.pop("kept", None)
        if gradient is None:  # given away by an earlier backward pass, or there was no forward pass
            gradient = np.empty_like(self.entries[0])
            self._fill(gradient)
        rows = kernels.gradient_table(self.edges, self.owners, weights, self.delta)
        given = self.entries[0], self.edges[0], rows, _buckets_in(gradient), gradient
        in_parts(lambda start, stop: kernels.write_gradient(start, stop, *given), gradient.size)
        gradient[self.at] = own
        return torch.from_numpy(gradient)

    def above(self, values: Array) -> Array:
        return kernels.sum_above(*self.windows, values)

    def above_worse(self, values: Array) -> Array:
        return _above_worse(self.windows, self.labels, values)

    def below_better(self, values: Array) -> Array:
        # Seen from the other end of the list, "below and better" is "above and worse". A column of zeros, as the
        # kernel takes two.
        windows = kernels.windows(-self.scores[::-1], self.delta)
        columns = np.stack([values[::-1], np.zeros_like(values)], 1)
        return _above_worse(windows, -self.labels[::-1], columns)[::-1, 0]


@average_precision.register
def _(comparison: Fused) -> Terms:
    # The same in one call, as those to numpy cost small inputs more than the arithmetic.
    loss, *vectors = kernels.average_precision(
        comparison.scores, comparison.edges, comparison.owners, comparison.buckets, comparison.delta
    )
    return Terms(loss, None, vectors)


def _positives(targets: Array) -> Array:
    """Where the positives are, in ascending order."""
    first, *more = in_parts(lambda start, stop: (targets[start:stop] > 0).nonzero()[0] + start, targets.size)
    return np.concatenate([first, *more]) if more else first


def _buckets_in(gradient: Array) -> Array:
    """The memory of ``gradient``, to keep numbers of buckets in."""
    return gradient.view(np.uint32 if gradient.itemsize == 4 else np.uint64)


def _above_worse(windows: tuple[Array, Array, Array], labels: Array, values: Array) -> Array:
    sums = np.empty_like(values)
    order = labels.argsort()
    in_parts(
        lambda start, stop: kernels.sum_above_worse(start, stop, *windows, order, labels, values, sums),
        labels.size,
        FEWEST_POSITIVES,
    )
    return sums
