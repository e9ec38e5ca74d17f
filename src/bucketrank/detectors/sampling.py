"""The samplers of the score-based R-CNNs; ranking losses need none."""

from __future__ import annotations

from torch import Tensor
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler

from bucketrank.ops.assignment import IGNORED, NEGATIVE


def subsample(match: Tensor, sampler: BalancedPositiveNegativeSampler) -> Tensor:
    """The assignment of one image with all candidates ignored that are not drawn."""
    marks = (match >= 0).float().masked_fill(match < NEGATIVE, -1)  # torchvision's: 1 object, 0 background, -1 neither
    (positive,), (negative,) = sampler([marks])
    return match.masked_fill(~(positive | negative).bool(), IGNORED)
