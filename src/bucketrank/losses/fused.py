"""Exact bucketing of CPU tensors with compiled loops: one pass over the logits forward, one backward.

The forward pass stores the bucket of every negative in the memory of the future gradient, and the backward pass
overwrites it. So no bucket is computed twice, and the buckets need no memory of their own.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bucketrank.losses import kernels
from bucketrank.losses.comparison import Array, Comparison, can_place_edges
from bucketrank.losses.kernel_calls import call_kernel
from bucketrank.losses.threads import in_parts

# The fewest positives per thread in the sums over positives; each positive costs as much as hundreds of negatives.
FEWEST_POSITIVES = 1 << 13


class Fused(Comparison):
    """Exact bucketing, the numbers of ``exact.py``, computed in numpy by the loops of ``kernels.py``."""

    xp: Any = np
    has_edges = True
    # The memory of the gradient, which holds the bucket of every negative; None once it has been returned.
    gradient: Array | None = None

    def __init__(self, logits: Tensor, targets: Tensor, delta: float) -> None:
        self.delta = delta
        self.logits, self.targets = logits.detach().numpy(), targets.numpy()
        self.at = _positives(self.targets)
        self.scores = self.logits[self.at].astype(np.float64)
        order = self.scores.argsort()
        self.at, self.scores = self.at[order], self.scores[order]
        if not self.at.size:
            self.finite = self._all_finite()
            return
        self.finite = -np.inf < self.scores.item(0) <= self.scores.item(-1) < np.inf
        if self.finite and self.is_accurate():  # otherwise the definition replaces this comparison
            self.edges, self.owners, *self.tables = call_kernel(kernels.look_up_table, self.scores, delta, self.logits)
            self.gradient = np.empty_like(self.logits)
            self.finite = self._fill(self.gradient)

    @property
    def index(self) -> Tensor:
        return torch.from_numpy(self.at)

    @cached_property
    def labels(self) -> Array:
        return self.targets[self.at].astype(np.float64)

    @cached_property
    def windows(self) -> tuple[Array, Array, Array]:
        """See :func:`kernels.windows`."""
        x, low, high = call_kernel(kernels.windows, self.scores, self.delta)
        return x, low, high

    def _all_finite(self) -> bool:
        logits, targets = self.logits, self.targets
        return all(
            in_parts(lambda start, stop: call_kernel(kernels.all_finite, start, stop, logits, targets), targets.size)
        )

    def _fill(self, gradient: Array) -> bool:
        """Count the negatives of each bucket, store their buckets in ``gradient``, return whether all is finite."""
        arguments = self.logits, self.targets, self.edges, *self.tables, _buckets_in(gradient)
        (self.buckets, finite), *parts = in_parts(
            lambda start, stop: call_kernel(kernels.fill_buckets, start, stop, *arguments), gradient.size
        )
        for buckets, part_finite in parts:
            self.buckets += buckets
            finite &= part_finite
        return bool(finite)

    def is_accurate(self) -> bool:
        if not self.scores.size:
            return True
        return can_place_edges(max(-self.scores.item(0), self.scores.item(-1)), self.delta)

    def vector(self, values: Tensor) -> Array:
        return values.double().numpy()  # numpy has no bfloat16

    def number(self, value: Tensor) -> Any:
        return value.item()

    def mean(self, errors: Array) -> Tensor:
        return torch.from_numpy(np.asarray(errors.sum() / errors.size, self.logits.dtype))

    def running_minimum(self, values: Array) -> Array:
        return np.minimum.accumulate(values)

    def ranks(self) -> tuple[Array, Array]:
        false_positives, rank = call_kernel(
            kernels.count_ranks, self.scores, self.edges, self.owners, self.buckets, self.delta
        )
        return false_positives, rank

    def false_positives(self) -> Array:
        return call_kernel(kernels.count_false_positives, self.edges, self.owners, self.buckets, self.delta)

    def spread(self, weights: Array, own: Array) -> Tensor:
        gradient, self.gradient = self.gradient, None
        if gradient is None:  # already returned by an earlier backward pass
            gradient = np.empty_like(self.logits)
            self._fill(gradient)
        table = call_kernel(kernels.gradient_table, self.edges, self.owners, weights, self.delta)
        arguments = self.logits, self.edges[0], table, _buckets_in(gradient), gradient
        in_parts(lambda start, stop: call_kernel(kernels.write_gradient, start, stop, *arguments), gradient.size)
        gradient[self.at] = own
        return torch.from_numpy(gradient)

    def above(self, values: Array) -> Array:
        return call_kernel(kernels.sum_above, *self.windows, values)

    def above_worse(self, values: Array) -> Array:
        return _above_worse(self.windows, self.labels, values)

    def below_better(self, values: Array) -> Array:
        # In the reversed list, "below and better" becomes "above and worse". The kernel takes two columns, so one is 0.
        windows = call_kernel(kernels.windows, -self.scores[::-1], self.delta)
        columns = np.stack([values[::-1], np.zeros_like(values)], 1)
        return _above_worse(windows, -self.labels[::-1], columns)[::-1, 0]


def _positives(targets: Array) -> Array:
    """Return the positions of the positives, ascending."""
    parts = in_parts(lambda start, stop: (start, (targets[start:stop] > 0).nonzero()[0]), targets.size)
    return np.concatenate([start + positions for start, positions in parts]) if len(parts) > 1 else parts[0][1]


def _buckets_in(gradient: Array) -> Array:
    """Return the memory of ``gradient`` as unsigned integers that hold the numbers of buckets."""
    return gradient.view(np.uint32 if gradient.itemsize == 4 else np.uint64)


def _above_worse(windows: tuple[Array, Array, Array], labels: Array, values: Array) -> Array:
    sums = np.empty_like(values)
    order = labels.argsort()
    in_parts(
        lambda start, stop: call_kernel(kernels.sum_above_worse, start, stop, *windows, order, labels, values, sums),
        labels.size,
        FEWEST_POSITIVES,
    )
    return sums
