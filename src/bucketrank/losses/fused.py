"""Exact bucketing on CPU tensors with compiled loops: one pass over the logits forward, one backward."""

from __future__ import annotations

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
        self.logits, self.targets, self.delta = logits, targets, delta
        self.entries = s, t = logits.detach().numpy(), targets.numpy()
        self.at = np.flatnonzero(t > 0) if index is None else index.numpy()
        self.scores = s[self.at].astype(np.float64)
        if index is None:
            order = self.scores.argsort()
            self.at, self.scores = self.at[order], self.scores[order]
            self.finite = self._fill()
            index = torch.from_numpy(self.at)
        self.index = index

    def _fill(self) -> bool:
        """Fill the buckets, and tell whether all was finite."""
        s, t = self.entries
        if not self.scores.size or not -np.inf < self.scores[0] <= self.scores[-1] < np.inf:
            return not self.scores.size and all(
                in_parts(lambda start, stop: kernels.all_finite(start, stop, s, t), t.size)
            )
        self.edges, self.owners, *table = kernels.look_up_table(self.scores, self.delta)
        given = s, t, self.edges, *table
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
        edges, owners, *table = kernels.look_up_table(self.scores, self.delta)
        gradient = np.empty_like(self.entries[0])
        given = *self.entries, edges, *table, kernels.gradient_table(edges, owners, weights, self.delta), gradient
        in_parts(lambda start, stop: kernels.write_gradient(start, stop, *given), gradient.size)
        gradient[self.at] = own
        return torch.from_numpy(gradient)

    def above(self, values: Array) -> Array:
        return kernels.sum_above(*kernels.windows(self.scores, self.delta), values)

    def above_worse(self, values: Array) -> Array:
        return _above_worse(self.scores, self.labels, values, self.delta)

    def below_better(self, values: Array) -> Array:
        # Seen from the other end of the list, "below and better" is "above and worse". Copies, as numba would
        # compile its loops once more for arrays that run backwards.
        return _above_worse(-self.scores[::-1], -self.labels[::-1], values[::-1, None].copy(), self.delta)[::-1, 0]


def _above_worse(scores: Array, labels: Array, values: Array, delta: float) -> Array:
    sums = np.empty_like(values)
    given = *kernels.windows(scores, delta), labels.argsort(), labels, values, sums
    in_parts(lambda start, stop: kernels.sum_above_worse(start, stop, *given), scores.size, FEWEST_POSITIVES)
    return sums
