"""The definition: every positive compared with every logit (paper, Algorithm 1). O(P (P + N)), in O(P + N) memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bucketrank.losses.comparison import Array, TorchComparison, precise
from bucketrank.losses.step import step_

# Comparisons per chunk: a chunk of this size stays in the processor's cache.
CHUNK = 1 << 20


class Pairwise(TorchComparison):
    """Compares one chunk of positives at a time, in the precision of the logits if that holds ``2 * delta``."""

    def __init__(self, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None) -> None:
        super().__init__(logits, targets, delta, index)
        logits, self.delta = _in_range(logits, delta)
        self.positives = logits[self.index]
        lowest = self.positives.amin() if self.positives.numel() else torch.inf
        # H is 0 for a negative further than delta below every positive (Algorithm 1, line 2).
        self.relevant = (targets == 0) & (logits >= lowest - self.delta)
        self.negatives = logits[self.relevant]

    def _chunks(self, others: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the positives i, each with the matrix of H(others_j - s_i)."""
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
        """Return a gradient over all logits: ``gradient`` at the relevant negatives, ``own`` at the positives."""
        placed = torch.zeros_like(self.logits).masked_scatter_(self.relevant, gradient.to(self.logits.dtype))
        return placed.index_copy_(0, self.index, own.to(placed.dtype))


def _in_range(logits: Tensor, delta: float) -> tuple[Tensor, float]:
    """Return ``logits`` and ``delta`` in a wider dtype and at a smaller scale if ``2 * delta`` would overflow.

    A difference of logits may overflow: it is above ``2 * delta`` then, and H is 0 or 1.
    """
    if 2 * delta <= torch.finfo(logits.dtype).max:
        return logits, delta
    logits = precise(logits)
    largest = torch.finfo(logits.dtype).max
    if 2 * delta <= largest:
        return logits, delta
    return logits * (largest / 8 / delta), largest / 8
