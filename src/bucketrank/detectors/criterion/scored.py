"""Score-based criteria, the baselines of the ranking losses: each score has its own loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from bucketrank.detectors.assignment import IGNORED, NEGATIVE
from bucketrank.detectors.criterion.base import Assigned, Criterion, HeadRecipe, LossTerms
from bucketrank.settings import LossSettings, loss_spec
from bucketrank.settings.loss_specs import FocalSettings


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
        """Compute the divisor of the sums from the number of rows."""
        return self.divisor(torch.full((), float(count), device=device)).clamp(min=1)

    def published_box_weights(self, assigned: Assigned) -> Tensor | None:
        return assigned.quality_targets

    @property
    def min_box_weight(self) -> float:
        # As published, ATSS divides by a sum of centerness targets of at least 1, PAA by any sum of IoUs.
        by_quality = self.quality_branch and self.settings.box_confidence is None
        return 1.0 if by_quality and self.recipe.average_counts else super().min_box_weight

    def classification(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Sum the loss over candidates (R, C), none of which is ignored."""
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

    def __init__(self, settings: LossSettings, recipe: HeadRecipe) -> None:
        super().__init__(settings, recipe)
        self.samples, self.softmax = recipe.samples, recipe.softmax

    def classification(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.softmax:
            background = logits.shape[1] - 1
            return F.cross_entropy(logits, torch.where(labels >= 0, labels, background), reduction="sum")
        return F.binary_cross_entropy_with_logits(logits, _one_hot(logits, labels), reduction="sum")


def _one_hot(logits: Tensor, labels: Tensor) -> Tensor:
    return (labels[:, None] == torch.arange(logits.shape[1], device=labels.device)).to(logits.dtype)


class QualityScored(Scored):
    """Any score-based loss on IoU targets with a ``function`` in its spec. It needs no quality branch."""

    prior = 0.01
    quality_branch = False
    always_giou = True

    def __init__(self, settings: LossSettings, recipe: HeadRecipe) -> None:
        super().__init__(settings, recipe)
        self.spec = loss_spec(settings.name)
        self.function = self.spec.load_function()

    def terms(self, assigned: Assigned) -> LossTerms:
        targets = assigned.targets(assigned.ious)
        total = self.scope.total(self.total(assigned.logits, targets))
        classification = total / self.divisor(self.count(targets)).clamp(min=1)
        return {"cls": classification, **self.box_terms(assigned, classification)}

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum the loss. A target is the IoU of a positive, 0 for a negative, -1 if ignored."""
        total: Tensor = self.function(logits, targets, **self.settings.arguments, reduction="sum")
        return total

    def count(self, targets: Tensor) -> Tensor:
        """Compute the normaliser: the number of positives, or the sum of their targets."""
        if self.spec.divisor == "targets":
            return targets.clamp(min=0).sum()
        return (targets > 0).sum().to(targets.dtype)

    def published_box_weights(self, assigned: Assigned) -> Tensor | None:
        if self.spec.box_weights == "confidence":
            return self.confidences(assigned)
        return assigned.ious if self.spec.box_weights == "iou" else None

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.total(logits, targets) / self.count(targets).clamp(min=1)
