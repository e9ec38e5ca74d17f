"""The paper's synthetic logits (supplement, "Further Details for the Analyses with Synthetic Data")."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bucketrank.bench.flops import Counts


class Synthetic(NamedTuple):
    """Flat logits with their targets: IoU label in (0, 1] for a positive, 0 for a negative, -1 for what is ignored."""

    logits: Tensor
    targets: Tensor

    def counts(self, delta: float) -> Counts:
        """The sizes that the cost of a loss depends on."""
        positives = self.logits[self.targets > 0].sort().values
        negatives = self.logits[self.targets == 0]
        relevant = negatives[negatives >= positives[:1] - delta]
        sizes = torch.bincount(torch.searchsorted(positives, relevant, right=True))
        return Counts(positives.numel(), negatives.numel(), relevant.numel(), int(sizes.count_nonzero()))

    def thinned(self, positives: int) -> Synthetic:
        """The same logits with only so many of the positives; the others are ignored.

        The lowest positive stays, so the relevant negatives stay the same.
        """
        index = (self.targets > 0).nonzero().squeeze(1)
        lowest = self.logits[index].argmin()
        index[[0, int(lowest)]] = index[[int(lowest), 0]]
        targets = self.targets.clone()
        targets[index[positives:]] = -1
        return Synthetic(self.logits, targets)


def draw(size: int, percent: float, *, seed: int, device: str = "cpu") -> Synthetic:
    """``size`` logits, ``percent`` of them positive, in random order: positives from N(-1, 1), negatives from N(1, 1).

    Labels are uniform on (0, 1]: a label of 0 would be a negative. There is at least one positive.
    Drawn on the CPU, so every device gets the same numbers.

    >>> draw(1000, 5.0, seed=0).counts(delta=1.0).positives
    50
    """
    if size < 2 or not 0 < percent < 100:
        raise ValueError(f"draw: expected size >= 2 and 0 < percent < 100, got size {size} and percent {percent}")
    generator = torch.Generator().manual_seed(seed)
    positives = min(max(round(size * percent / 100), 1), size - 1)
    logits = torch.randn(size, generator=generator)
    targets = torch.zeros(size)
    where = torch.randperm(size, generator=generator)[:positives]
    targets[where] = 1 - torch.rand(positives, generator=generator)
    logits += torch.where(targets > 0, -1.0, 1.0)
    return Synthetic(logits.to(device), targets.to(device))
