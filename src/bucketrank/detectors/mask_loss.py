"""The mask loss of Mask R-CNN.

Each of its choices is a setting. By default, it is the choice published for the loss that trains the detector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bucketrank.catalogue.detector_specs import MaskRCNNSettings
from bucketrank.detectors.criterion import Criterion, LossTerms
from bucketrank.losses import self_balance


def dice_errors(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the Dice loss (P,) of masks (P, H, W)."""
    masks, targets = logits.float().sigmoid().flatten(1), targets.float().flatten(1)
    return 1 - 2 * (masks * targets).sum(1) / ((masks**2).sum(1) + (targets**2).sum(1) + 1e-5)


def bce_errors(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the binary cross-entropy (P,) of masks (P, H, W), averaged over the pixels of each mask."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets.float(), reduction="none").flatten(1).mean(1)


ERRORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"dice": dice_errors, "bce": bce_errors}


@dataclass(frozen=True)
class MaskLoss:
    """The weighted mean of the errors of the masks, times a weight or scaled to the classification loss."""

    name: str  # dice or bce
    balance: bool  # whether the loss is scaled to the value of the box head's classification loss
    confidence: bool  # whether a positive counts by its highest class score; otherwise positives count equally
    weight: float  # of the loss where it is not balanced

    @classmethod
    def from_settings(cls, settings: MaskRCNNSettings, criterion: Criterion) -> MaskLoss:
        """Return the loss with the choices of the settings; where they are None, with those of the criterion."""
        published = "dice" if criterion.ranking else "bce"
        balanced = criterion.self_balanced and settings.mask_weight is None
        return cls(
            name=settings.mask_loss or published,
            balance=balanced if settings.mask_balance is None else settings.mask_balance,
            confidence=criterion.ranking if settings.mask_confidence is None else settings.mask_confidence,
            weight=1.0 if settings.mask_weight is None else settings.mask_weight,
        )

    def __call__(
        self, logits: Tensor, targets: Tensor, *, class_logits: Tensor, terms: LossTerms, criterion: Criterion
    ) -> Tensor:
        """Return the loss of the masks of P positives; ``logits`` and ``targets`` are (P, H, W).

        ``class_logits`` (P, C) are the positives' logits of the box head, ``terms`` are its loss terms and
        ``criterion`` is its criterion.
        """
        errors = ERRORS[self.name](logits, targets)
        weights = criterion.highest_scores(class_logits) if self.confidence else torch.ones_like(errors)
        mean = criterion.mean(errors, weights)
        if self.balance:
            return self_balance(mean, to=criterion.classification_loss(terms))
        return self.weight * mean
