"""Faster R-CNN (Ren et al., NeurIPS 2015)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchvision.models.detection.image_list import ImageList

from bucketrank.catalogue import LossSettings
from bucketrank.catalogue.detector_specs import FasterRCNNSettings
from bucketrank.detectors.box_head import BoxHead, BoxHeadStep
from bucketrank.detectors.criterion import named
from bucketrank.detectors.rcnn import RCNN
from bucketrank.detectors.targets import Target


class FasterRCNN(RCNN):
    """An RPN and a box head. Ranking losses train on all proposals, cross-entropy on a sample of 512 per image."""

    def __init__(self, num_classes: int, *, loss: LossSettings, settings: FasterRCNNSettings, **shared: Any) -> None:
        super().__init__(num_classes, loss=loss, settings=settings, **shared)
        self.box_head = BoxHead(settings.channels, num_classes=num_classes, loss=loss, hidden=settings.hidden)

    def scoring_heads(self) -> list[BoxHead]:
        return [self.box_head]

    def losses(self, images: ImageList, features: list[Tensor], ground_truths: list[Target]) -> dict[str, Tensor]:
        proposals, terms = self.rpn(images, features, ground_truths)
        step = self.box_head.train_on(features, proposals, ground_truths, images.image_sizes)
        extra = self.extra_losses(features, step, ground_truths, images.image_sizes)
        return named("rpn", terms) | named("roi", step.terms) | extra

    def extra_losses(
        self, features: list[Tensor], step: BoxHeadStep, ground_truths: list[Target], image_sizes: list[tuple[int, int]]
    ) -> dict[str, Tensor]:
        """Return the loss terms of further heads: none here."""
        return {}

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        proposals, _ = self.rpn(images, features)
        logits, box_deltas = self.box_head(features, proposals, images.image_sizes)
        scores = self.box_head.criterion.scores(logits)
        return self.detections_of(scores, box_deltas, proposals, images.image_sizes, self.box_head.coder)
