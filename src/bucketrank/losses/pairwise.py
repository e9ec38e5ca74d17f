"""The definition and the paper's bucketing, which compare positives with other entries pair by pair.

``Pairwise`` compares every positive with every logit (paper, Algorithm 1) in O(P (P + N)) time and O(P + N) memory.
``Bucketed`` replaces all negatives between two positives by their mean (paper, Algorithm 2) in O((P + N) log P + P^2)
time. It approximates the definition for delta > 0 and equals it at delta 0 (paper, Theorem 1).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bucketrank.losses.comparison import Array, TorchComparison, precise, step_

# Comparisons per chunk; a chunk of this size stays in the CPU cache.
CHUNK = 1 << 20


class Pairwise(TorchComparison):
    """The definition, one chunk of positives at a time, in the logits' dtype unless ``2 * delta`` overflows it."""

    def __init__(self, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None) -> None:
        super().__init__(logits, targets, delta, index)
        logits, self.delta = in_range(logits, delta)
        self.positives = logits[self.index]
        lowest = self.positives.amin() if self.positives.numel() else torch.inf
        # H is 0 for negatives more than delta below every positive (Algorithm 1, line 2).
        self.relevant = (targets == 0) & (logits >= lowest - self.delta)
        self.negatives = logits[self.relevant]

    def _chunks(self, others: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of the positives i, each with the matrix H(others_j - s_i)."""
        rows = max(1, CHUNK // max(1, others.numel()))
        for start in range(0, self.positives.numel(), rows):
            chunk = slice(start, start + rows)
            yield chunk, step_(others - self.positives[chunk, None], self.delta)

    def false_positives(self) -> Array:
        sums = torch.empty_like(self.scores)
        for chunk, compared in self._chunks(self.negatives):
            sums[chunk] = compared.sum(dim=1, dtype=sums.dtype)
        return sums

    def above(self, values: Array) -> Array:
        sums = torch.empty_like(values)
        for chunk, compared in self._chunks(self.positives):
            sums[chunk] = compared.to(values.dtype) @ values
        return sums

    def above_worse(self, values: Array) -> Array:
        sums, labels = torch.empty_like(values), self.labels
        for chunk, compared in self._chunks(self.positives):
            sums[chunk] = (compared * (labels < labels[chunk, None])).to(values.dtype) @ values
        return sums

    def below_better(self, values: Array) -> Array:
        sums, labels = torch.zeros_like(values), self.labels
        for chunk, compared in self._chunks(self.positives):
            sums += values[chunk] @ (compared * (labels < labels[chunk, None])).to(values.dtype)
        return sums

    def spread(self, weights: Array, own: Array) -> Tensor:
        sums = torch.zeros(self.negatives.shape, dtype=weights.dtype, device=weights.device)
        for chunk, compared in self._chunks(self.negatives):
            sums += weights[chunk] @ compared.to(weights.dtype)
        return self._place(sums, own)

    def _place(self, gradient: Tensor, own: Tensor) -> Tensor:
        """Place ``gradient`` at the relevant negatives and ``own`` at the positives."""
        placed = torch.zeros_like(self.logits).masked_scatter_(self.relevant, gradient.to(self.logits.dtype))
        return placed.index_copy_(0, self.index, own.to(placed.dtype))


class Bucketed(Pairwise):
    """The paper's bucketing: at most P + 1 prototypes, each weighted by its bucket size, replace the negatives."""

    def __init__(self, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None) -> None:
        super().__init__(logits, targets, delta, index)
        if self.positives.numel() == 0:
            return
        # A mean needs more digits than its members, so prototypes are stored and compared in full precision.
        members, positives = precise(self.negatives), precise(self.positives)
        # The bucket of a negative is the number of positives at or below it: a tied negative ranks above the
        # positive, like H(0) = 1 at delta 0.
        self.bucket = torch.searchsorted(positives, members, right=True)
        buckets = self.positives.numel() + 1
        # bincount would cause a device sync.
        self.sizes = self.bucket.new_zeros(buckets).index_add_(0, self.bucket, torch.ones_like(self.bucket))
        # Averaging distances from the positive below (in the lowest bucket, from the lowest positive) loses no digits.
        base = torch.cat([positives[:1], positives])
        offsets = torch.zeros_like(base).index_add_(0, self.bucket, members - base[self.bucket])
        means = base + offsets / self.sizes.clamp(min=1)
        # Rounding must not move a mean out of its bucket.
        highest = means.scatter_reduce(0, self.bucket, members, "amax", include_self=False)
        lowest = means.scatter_reduce(0, self.bucket, members, "amin", include_self=False)
        self.prototypes = means.clamp(lowest, highest)

    def false_positives(self) -> Array:
        sums = torch.empty_like(self.scores)
        sizes = self.sizes.to(sums.dtype)
        for chunk, compared in self._chunks(self.prototypes):
            sums[chunk] = compared.to(sums.dtype) @ sizes
        return sums

    def spread(self, weights: Array, own: Array) -> Tensor:
        sums = torch.zeros(self.sizes.shape, dtype=weights.dtype, device=weights.device)
        for chunk, compared in self._chunks(self.prototypes):
            sums += weights[chunk] @ compared.to(weights.dtype)
        return self._place(sums[self.bucket], own)


def in_range(logits: Tensor, delta: float) -> tuple[Tensor, float]:
    """Widen the dtype of ``logits``, and if necessary scale both arguments down, so that ``2 * delta`` is finite."""
    # A difference of logits may still overflow. It then exceeds 2 * delta, and H is 0 or 1.
    if 2 * delta <= torch.finfo(logits.dtype).max:
        return logits, delta
    logits = precise(logits)
    largest = torch.finfo(logits.dtype).max
    if 2 * delta <= largest:
        return logits, delta
    return logits * (largest / 8 / delta), largest / 8
