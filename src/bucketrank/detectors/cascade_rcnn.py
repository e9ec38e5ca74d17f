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

# Score-based training weighs the later stages less and codes their smaller corrections finer; the ranking losses are
# balanced by themselves and compare decoded boxes.
STAGE_WEIGHTS = (1.0, 0.5, 0.25)
STAGE_CODERS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))


class CascadeRCNN(RCNN):
    """Three box heads, each refining the boxes of the one before and asking more of a positive."""

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

    def losses(self, images: ImageList, features: list[Tensor], truths: list[Target]) -> dict[str, Tensor]:
        proposals, terms = self.rpn(images, features, truths)
        losses = named("rpn", terms)
        for number, head in enumerate(self.stages, start=1):
            trained = head.train_on(features, proposals, truths, images.image_sizes)
            losses |= named(f"stage{number}", trained.terms)
            refined = head.refined(trained.codes, trained.proposals, images.image_sizes)
            # The objects were added to this stage only; the next adds them again.
            proposals = [boxes[given] for boxes, given in zip(refined, trained.given, strict=True)]
        return losses

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        proposals, _ = self.rpn(images, features)
        stages = []
        for head in self.stages:
            boxes = proposals
            logits, codes = head(features, boxes, images.image_sizes)
            stages.append(logits.float())
            proposals = head.refined(codes, boxes, images.image_sizes)
        scores = head.criterion.scores(torch.stack(stages).mean(0))
        return self.detections_of(scores, codes, boxes, images.image_sizes, head.coder)
