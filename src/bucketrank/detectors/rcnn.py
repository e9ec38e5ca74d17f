"""The base of the R-CNNs: feature pyramid, RPN, and the step from scored proposals to detections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import clip_boxes_to_image

from bucketrank.calibration.score_head import ScoreHead
from bucketrank.catalogue import BackboneSettings, InputSettings, LossSettings
from bucketrank.catalogue.detector_specs import RCNNSettings
from bucketrank.detectors.box_head import BoxHead
from bucketrank.detectors.detector import Detector
from bucketrank.detectors.feature_pyramid import FeaturePyramid
from bucketrank.detectors.postprocess import best_entries, without_duplicates
from bucketrank.detectors.rpn import RPN


class RCNN(Detector):
    """A pyramid from P2 to P6 and an RPN; a subclass adds the heads over the proposals."""

    border: int | None = None  # pixels by which a trained anchor may extend beyond its image; None: no limit

    def __init__(
        self,
        num_classes: int,
        *,
        backbone: BackboneSettings,
        loss: LossSettings,
        inputs: InputSettings,
        settings: RCNNSettings,
    ) -> None:
        super().__init__(num_classes, backbone=backbone, inputs=inputs)
        self.neck = FeaturePyramid(self.backbone.channels, settings.channels, first_level=2, extra="pool")
        self.rpn = RPN(
            settings.channels,
            loss=loss,
            strides=self.neck.strides,
            proposals=settings.proposals,
            candidates=settings.proposal_candidates,
            test_proposals=settings.test_proposals,
            size_divisor=self.size_divisor,
            border=self.border,
        )
        self.candidates, self.score_threshold = settings.candidates, settings.score_threshold
        self.nms, self.detections = settings.nms, settings.detections

    def scoring_heads(self) -> Sequence[BoxHead]:
        """Return the box heads whose mean logits become the scores of detections."""
        raise NotImplementedError

    def score_head(self) -> ScoreHead:
        heads = self.scoring_heads()
        layers = tuple(head.classes for head in heads)
        if heads[-1].criterion.softmax:
            return ScoreHead("softmax", layers=layers, columns=self.num_classes + 1, background=self.num_classes)
        thresholds = ((self, "score_threshold"),)
        return ScoreHead("sigmoid", layers=layers, columns=self.num_classes, thresholds=thresholds)

    def detections_of(
        self,
        scores: Tensor,
        box_deltas: Tensor,
        proposals: list[Tensor],
        image_sizes: list[tuple[int, int]],
        coder: BoxCoder,
    ) -> list[dict[str, Tensor]]:
        """Return the detections per image from ``scores`` (R, C) and ``box_deltas`` (R, C or 1, 4) of all proposals."""
        results = []
        counts = [boxes.shape[0] for boxes in proposals]
        parts = zip(scores.split(counts), box_deltas.split(counts), proposals, image_sizes, strict=True)
        for score, deltas, boxes, size in parts:
            values, rows, labels = best_entries(score, limit=self.candidates, threshold=self.score_threshold)
            class_deltas = deltas[rows, torch.zeros_like(labels) if deltas.shape[1] == 1 else labels].float()
            decoded = clip_boxes_to_image(coder.decode_single(class_deltas, boxes[rows]), size)
            results.append(without_duplicates(decoded, values, labels, iou=self.nms, limit=self.detections))
        return results
