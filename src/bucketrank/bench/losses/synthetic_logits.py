"""The paper's synthetic logits (supplement, "Further Details for the Analyses with Synthetic Data")."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bucketrank.bench.losses.flops import Counts


class SyntheticLogits(NamedTuple):
    """Flat logits and their targets: the IoU label in (0, 1] of a positive, 0 for a negative, -1 for an ignored one."""

    logits: Tensor
    targets: Tensor

    def counts(self, delta: float) -> Counts:
        """Return the counts that the operations of a loss depend on."""
        positives = self.logits[self.targets > 0].sort().values
        negatives = self.logits[self.targets == 0]
        relevant = negatives[negatives >= positives[:1] - delta]
        sizes = torch.bincount(torch.searchsorted(positives, relevant, right=True))
        return Counts(positives.numel(), negatives.numel(), relevant.numel(), int(sizes.count_nonzero()))

    def thinned(self, positives: int) -> SyntheticLogits:
        """Return the same logits with only ``positives`` of the positives; the others are ignored.

        The lowest positive is kept, so the relevant negatives are the same.
        """
        index = (self.targets > 0).nonzero().squeeze(1)
        lowest = self.logits[index].argmin()
        index[[0, int(lowest)]] = index[[int(lowest), 0]]
        targets = self.targets.clone()
        targets[index[positives:]] = -1
        return SyntheticLogits(self.logits, targets)


def draw_logits(size: int, percent: float, *, seed: int, device: str = "cpu") -> SyntheticLogits:
    """Draw ``size`` logits in random order: ``percent`` positives from N(-1, 1), the negatives from N(1, 1).

    Labels are uniform on (0, 1]: a label of 0 would be a negative. At least one logit is positive.
    The numbers are drawn on the CPU, so that they are the same on every device.

    >>> draw_logits(1000, 5.0, seed=0).counts(delta=1.0).positives
    50
    """
    if size < 2 or not 0 < percent < 100:
        raise ValueError(
            f"draw_logits: expected size >= 2 and 0 < percent < 100, got size {size} and percent {percent}"
        )
    generator = torch.Generator().manual_seed(seed)
    positives = min(max(round(size * percent / 100), 1), size - 1)
    logits = torch.randn(size, generator=generator)
    targets = torch.zeros(size)
    positions = torch.randperm(size, generator=generator)[:positives]
    targets[positions] = 1 - torch.rand(positives, generator=generator)
    logits += torch.where(targets > 0, -1.0, 1.0)
    return SyntheticLogits(logits.to(device), targets.to(device))
