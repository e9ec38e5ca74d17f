"""The balanced sample of candidates that the score-based R-CNNs train on; ranking losses train on all candidates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bucketrank.ops.assignment import IGNORED, NEGATIVE


@dataclass(frozen=True)
class CandidateSampler:
    """Draw at most ``count`` candidates per image, at most ``positive_fraction`` of them positives."""

    count: int
    positive_fraction: float

    def rows(self, match: Tensor) -> Tensor:
        """Return the rows (K,) of the candidates drawn from one image, ascending; ``match`` (A,) is its assignment.

        The same random numbers draw the same candidates as in torchvision's ``BalancedPositiveNegativeSampler``.
        """
        positive, negative = torch.where(match >= 0)[0], torch.where(match == NEGATIVE)[0]
        positive = _random_subset(positive, int(self.count * self.positive_fraction))
        negative = _random_subset(negative, self.count - len(positive))
        return torch.cat([positive, negative]).sort().values

    def subsample(self, match: Tensor) -> Tensor:
        """Return the assignment of one image with every candidate ignored that is not drawn."""
        rows = self.rows(match)
        return torch.full_like(match, IGNORED).scatter_(0, rows, match[rows])


def _random_subset(rows: Tensor, count: int) -> Tensor:
    return rows[torch.randperm(len(rows), device=rows.device)[:count]]
