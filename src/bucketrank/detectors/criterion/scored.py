"""The criteria of the score-based losses, which treat each score on its own: the baselines of the ranking losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from bucketrank.catalogue.loss_specs import (
    FocalSettings,
    IoUAwareBCESettings,
    MALSettings,
    QualityFocalSettings,
    VarifocalSettings,
)
from bucketrank.detectors.assignment import IGNORED, NEGATIVE
from bucketrank.detectors.criterion.base import Assigned, Criterion, LossTerms
from bucketrank.losses import iou_aware_bce_loss, mal_loss, quality_focal_loss, soft_bce_loss, varifocal_loss


class Scored(Criterion):
    """Base class of the score-based losses: classification, boxes, and the quality branch if the head has one."""

    quality_branch = True
    always_giou = False

    def terms(self, assigned: Assigned) -> LossTerms:
        used = torch.where(assigned.labels != IGNORED)[0]
        norm = self.norm(len(used if self.samples else assigned.rows), used.device)
        classification = self.scope.total(self.classification(assigned.logits[used], assigned.labels[used])) / norm
        terms = {"cls": classification, **self.box_terms(assigned, classification, norm)}
        if assigned.quality_logits is None or assigned.quality_targets is None:
            return terms
        quality = F.binary_cross_entropy_with_logits(assigned.quality_logits, assigned.quality_targets, reduction="sum")
        return terms | {"quality": self.recipe.quality_weight * self.scope.total(quality) / norm}

    def norm(self, count: int, device: torch.device) -> Tensor:
        """Return the number of rows by which sums are divided."""
        return self.divisor(torch.full((), float(count), device=device)).clamp(min=1)

    def published_box_weights(self, assigned: Assigned) -> Tensor | None:
        return assigned.quality_targets

    def classification(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the loss over candidates (R, C), none of which is ignored."""
        raise NotImplementedError

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        used = targets >= 0
        positives = targets[used] > 0
        labels = torch.where(positives, 0, NEGATIVE)
        norm = used.sum() if self.samples else positives.sum()
        return self.classification(logits[used][:, None], labels) / norm.clamp(min=1)


class Focal(Scored):
    """Focal loss over all candidates, divided by the number of positives."""

    prior = 0.01
    settings: FocalSettings

    @property
    def matching_focal(self) -> tuple[float, float]:  # type: ignore[override]
        return self.settings.focal_alpha, self.settings.focal_gamma

    def classification(self, logits: Tensor, labels: Tensor) -> Tensor:
        alpha, gamma = self.matching_focal
        total: Tensor = sigmoid_focal_loss(logits, _one_hot(logits, labels), alpha, gamma, reduction="sum")
        return total


class CrossEntropy(Scored):
    """Cross-entropy. The R-CNNs compute it over a balanced sample; their box heads have a softmax with background."""

    @property
    def samples(self) -> bool:
        return self.recipe.samples

    @property
    def softmax(self) -> bool:
        return self.recipe.softmax

    def classification(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.softmax:
            background = logits.shape[1] - 1
            return F.cross_entropy(logits, torch.where(labels >= 0, labels, background), reduction="sum")
        return F.binary_cross_entropy_with_logits(logits, _one_hot(logits, labels), reduction="sum")


def _one_hot(logits: Tensor, labels: Tensor) -> Tensor:
    return (labels[:, None] == torch.arange(logits.shape[1], device=labels.device)).to(logits.dtype)


# The criteria of the score-based losses whose targets are IoUs: the rivals of RS loss, which sees the IoUs, too.


class QualityScored(Scored):
    """Base class of these losses: all candidates are trained, and no quality branch is needed."""

    prior = 0.01
    quality_branch = False
    always_giou = True

    def terms(self, assigned: Assigned) -> LossTerms:
        targets = assigned.targets(assigned.ious)
        total = self.scope.total(self.total(assigned.logits, targets))
        classification = total / self.divisor(self.count(targets)).clamp(min=1)
        return {"cls": classification, **self.box_terms(assigned, classification)}

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the loss; a target is the IoU of a positive, 0 for a negative, -1 if ignored."""
        raise NotImplementedError

    def count(self, targets: Tensor) -> Tensor:
        """Return the count by which the sum of the loss is divided: that of the positives."""
        return (targets > 0).sum().to(targets.dtype)

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.total(logits, targets) / self.count(targets).clamp(min=1)


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

    def count(self, targets: Tensor) -> Tensor:
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
