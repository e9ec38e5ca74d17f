"""Faster R-CNN (Ren et al., NeurIPS 2015)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchvision.models.detection.image_list import ImageList

from bucketrank.catalogue import LossSettings
from bucketrank.catalogue.detector_specs import FasterRCNNSettings
from bucketrank.detectors.box_head import BoxHead, Trained
from bucketrank.detectors.criterion import named
from bucketrank.detectors.rcnn import RCNN
from bucketrank.detectors.targets import Target


class FasterRCNN(RCNN):
    """Proposals, then classes and boxes. Ranking losses take all proposals; cross-entropy samples 512 an image."""

    low_quality: float | None = None  # in assigning proposals

    def __init__(self, num_classes: int, *, loss: LossSettings, settings: FasterRCNNSettings, **shared: Any) -> None:
        super().__init__(num_classes, loss=loss, settings=settings, **shared)
        self.box_head = BoxHead(
            settings.channels,
            num_classes=num_classes,
            loss=loss,
            hidden=settings.hidden,
            low_quality=self.low_quality,
        )

    def losses(self, images: ImageList, features: list[Tensor], truths: list[Target]) -> dict[str, Tensor]:
        proposals, terms = self.rpn(images, features, truths)
        trained = self.box_head.train_on(features, proposals, truths, images.image_sizes)
        rest = self.more_losses(features, trained, truths, images.image_sizes)
        return named("rpn", terms) | named("roi", trained.terms) | rest

    def more_losses(
        self, features: list[Tensor], trained: Trained, truths: list[Target], image_sizes: list[tuple[int, int]]
    ) -> dict[str, Tensor]:
        """Of heads beyond boxes; there are none here."""
        return {}

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        proposals, _ = self.rpn(images, features)
        logits, codes = self.box_head(features, proposals, images.image_sizes)
        scores = self.box_head.criterion.scores(logits)
        return self.detections_of(scores, codes, proposals, images.image_sizes, self.box_head.coder)
