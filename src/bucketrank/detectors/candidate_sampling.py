"""The balanced sample of candidates that the score-based R-CNNs train on; ranking losses train on all candidates."""

from __future__ import annotations

from torch import Tensor
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler

from bucketrank.ops.assignment import IGNORED, NEGATIVE


def subsample(match: Tensor, sampler: BalancedPositiveNegativeSampler) -> Tensor:
    """Return the assignment of one image with every candidate ignored that the sampler does not draw."""
    marks = (match >= 0).float().masked_fill(match < NEGATIVE, -1)  # as torchvision: 1 object, 0 background, -1 neither
    (positive,), (negative,) = sampler([marks])
    return match.masked_fill(~(positive | negative).bool(), IGNORED)
