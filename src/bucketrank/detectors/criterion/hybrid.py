"""The criterion of the sum of RS loss and Quality Focal Loss: ranked, and with scores that predict the IoU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from bucketrank.catalogue.loss_specs import RankSortQualitySettings
from bucketrank.detectors.criterion.assigned import Assigned
from bucketrank.detectors.criterion.base import LossTerms
from bucketrank.detectors.criterion.ranked import RankSort
from bucketrank.losses import quality_focal_loss


class RankSortQuality(RankSort):
    """RS loss plus Quality Focal Loss. Boxes are balanced to RS loss alone, masks to the sum of both."""

    prior = 0.01
    classification_terms: ClassVar[tuple[str, ...]] = ("rank", "sort", "qfl")
    settings: RankSortQualitySettings

    def terms_of_all(self, batch: Sequence[Assigned]) -> list[LossTerms]:
        return [
            {**terms, "qfl": self.quality_focal(assigned.logits, assigned.targets(assigned.ious))}
            for assigned, terms in zip(batch, super().terms_of_all(batch), strict=True)
        ]

    def quality_focal(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return Quality Focal Loss, divided by the number of positives."""
        total = quality_focal_loss(logits, targets, beta=self.settings.quality_beta, reduction="sum")
        positives = (targets > 0).sum().to(total.dtype)
        return self.scope.total(total) / self.scope.total(positives).clamp(min=1)

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().list_loss(logits, targets) + self.quality_focal(logits, targets)
