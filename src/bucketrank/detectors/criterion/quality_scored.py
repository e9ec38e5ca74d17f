"""The criteria of the score-based losses whose targets are IoUs: the rivals of RS loss, which sees the IoUs, too."""

from __future__ import annotations

from torch import Tensor

from bucketrank.catalogue.loss_specs import (
    IoUAwareBCESettings,
    MALSettings,
    QualityFocalSettings,
    VarifocalSettings,
)
from bucketrank.detectors.criterion.assigned import Assigned
from bucketrank.detectors.criterion.base import LossTerms
from bucketrank.detectors.criterion.scored import Scored
from bucketrank.losses import (
    iou_aware_bce_loss,
    mal_loss,
    quality_focal_loss,
    soft_bce_loss,
    varifocal_loss,
)


class QualityScored(Scored):
    """Base class of these losses: all candidates are trained, and no quality branch is needed."""

    prior = 0.01
    quality_branch = False
    always_giou = True

    def terms(self, assigned: Assigned) -> LossTerms:
        targets = assigned.targets(assigned.ious)
        total = self.scope.total(self.total(assigned.logits, targets))
        classification = total / self.scope.total(self.divisor(targets)).clamp(min=1)
        return {"cls": classification, **self.box_terms(assigned, classification)}

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the loss; a target is the IoU of a positive, 0 for a negative, -1 if ignored."""
        raise NotImplementedError

    def divisor(self, targets: Tensor) -> Tensor:
        """Return the number by which the sum of the loss is divided: that of the positives."""
        return (targets > 0).sum().to(targets.dtype)

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.total(logits, targets) / self.divisor(targets).clamp(min=1)


class QualityFocal(QualityScored):
    """Quality Focal Loss; a box counts by its confidence."""

    settings: QualityFocalSettings

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        return quality_focal_loss(logits, targets, beta=self.settings.quality_beta, reduction="sum")

    def published_box_weights(self, assigned: Assigned) -> Tensor:
        return self.confidences(assigned)


class Varifocal(QualityScored):
    """Varifocal Loss; a box counts by its IoU."""

    settings: VarifocalSettings

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        settings = self.settings
        return varifocal_loss(
            logits, targets, alpha=settings.varifocal_alpha, gamma=settings.varifocal_gamma, reduction="sum"
        )

    def published_box_weights(self, assigned: Assigned) -> Tensor:
        return assigned.ious


class SoftBCE(QualityScored):
    """Binary cross-entropy with IoU targets, divided by their sum; a box counts by its IoU."""

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        return soft_bce_loss(logits, targets, reduction="sum")

    def divisor(self, targets: Tensor) -> Tensor:
        return targets.clamp(min=0).sum()

    def published_box_weights(self, assigned: Assigned) -> Tensor:
        return assigned.ious


class MAL(QualityScored):
    """Matchability-Aware Loss."""

    settings: MALSettings

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        return mal_loss(logits, targets, gamma=self.settings.mal_gamma, reduction="sum")


class IoUAwareBCE(QualityScored):
    """IoU-aware BCE."""

    settings: IoUAwareBCESettings

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        settings = self.settings
        return iou_aware_bce_loss(
            logits, targets, alpha=settings.iabce_alpha, gamma=settings.iabce_gamma, reduction="sum"
        )
