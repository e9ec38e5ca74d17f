"""The paper's bucketing: the mean of all negatives between two positives stands for them (paper, Algorithm 2).

O((P + N) log P + P^2) time. An approximation when delta > 0; at delta 0 equal to the definition (paper, Theorem 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bucketrank.losses.comparison import Array, precise
from bucketrank.losses.pairwise import Pairwise


class Bucketed(Pairwise):
    """Compares the positives with at most P + 1 prototypes, each weighted by the size of its bucket."""

    def __init__(self, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None) -> None:
        super().__init__(logits, targets, delta, index)
        if self.positives.numel() == 0:
            return
        # A mean has more digits than its members: the prototypes are stored and compared in full precision.
        members, positives = precise(self.negatives), precise(self.positives)
        # The bucket of a negative is the number of positives at or below it: a tied negative ranks above the
        # positive, like H(0) = 1 at delta 0.
        self.bucket = torch.searchsorted(positives, members, right=True)
        buckets = self.positives.numel() + 1
        # Not by bincount, which would wait for a device.
        self.sizes = self.bucket.new_zeros(buckets).index_add_(0, self.bucket, torch.ones_like(self.bucket))
        # The mean is taken of the distances from the positive below (in the lowest bucket: from the lowest positive),
        # which loses no digits.
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
