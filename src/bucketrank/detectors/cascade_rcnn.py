"""Cascade R-CNN (Cai & Vasconcelos, CVPR 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from bucketrank.catalogue import LossSettings
from bucketrank.catalogue.detector_specs import CascadeRCNNSettings
from bucketrank.detectors.box_head import RECIPE, BoxHead
from bucketrank.detectors.criterion import named
from bucketrank.detectors.rcnn import RCNN
from bucketrank.detectors.targets import Target

# For score-based losses: the loss weight of each stage, and the weights of its box deltas. The deltas of later stages
# are smaller, hence the larger weights. Ranking losses balance themselves and compare decoded boxes.
STAGE_WEIGHTS = (1.0, 0.5, 0.25)
STAGE_CODERS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))


class CascadeRCNN(RCNN):
    """Three box heads; each refines the boxes of the previous one and requires a higher IoU of a positive."""

    border = 0

    def __init__(self, num_classes: int, *, loss: LossSettings, settings: CascadeRCNNSettings, **shared: Any) -> None:
        super().__init__(num_classes, loss=loss, settings=settings, **shared)
        ranking = self.rpn.criterion.ranking
        self.stages: Sequence[BoxHead] = nn.ModuleList(  # type: ignore[assignment]
            BoxHead(
                settings.channels,
                num_classes=num_classes,
                loss=loss,
                hidden=settings.hidden,
                class_agnostic=True,
                positive_iou=iou,
                coder_weights=STAGE_CODERS[0 if ranking else stage],
                recipe=replace(RECIPE, box_loss="smooth_l1", scored_weight=STAGE_WEIGHTS[stage], least_iou=iou),
            )
            for stage, iou in enumerate(settings.stage_ious)
        )

    def scoring_heads(self) -> Sequence[BoxHead]:
        return self.stages

    def losses(self, images: ImageList, features: list[Tensor], ground_truths: list[Target]) -> dict[str, Tensor]:
        proposals, terms = self.rpn(images, features, ground_truths)
        losses = named("rpn", terms)
        for number, head in enumerate(self.stages, start=1):
            step = head.train_on(features, proposals, ground_truths, images.image_sizes)
            losses |= named(f"stage{number}", step.terms)
            refined = head.refined(step.box_deltas, step.proposals, images.image_sizes)
            # Drop the ground-truth boxes; the next stage adds them again.
            proposals = [boxes[rows] for boxes, rows in zip(refined, step.proposal_rows, strict=True)]
        return losses

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        proposals, _ = self.rpn(images, features)
        stage_logits = []
        for head in self.stages:
            boxes = proposals
            logits, box_deltas = head(features, boxes, images.image_sizes)
            stage_logits.append(logits.float())
            proposals = head.refined(box_deltas, boxes, images.image_sizes)
        scores = head.criterion.scores(torch.stack(stage_logits).mean(0))
        return self.detections_of(scores, box_deltas, boxes, images.image_sizes, head.coder)
