"""What the R-CNNs share: from scored proposals to detections."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import clip_boxes_to_image

from bucketrank.catalogue import BackboneSettings, InputSettings, LossSettings
from bucketrank.catalogue.detector_specs import RCNNSettings
from bucketrank.detectors.detector import Detector
from bucketrank.detectors.neck import FeaturePyramid
from bucketrank.detectors.postprocess import best_entries, without_duplicates
from bucketrank.detectors.rpn import RPN


class RCNN(Detector):
    """A pyramid from P2 to P6 and a network that proposes; the heads over the proposals are the detector's own."""

    border: int | None = None  # how far an anchor may reach out of its image and still be trained; None: any

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

    def detections_of(
        self,
        scores: Tensor,
        codes: Tensor,
        proposals: list[Tensor],
        image_sizes: list[tuple[int, int]],
        coder: BoxCoder,
    ) -> list[dict[str, Tensor]]:
        """Of each image, from ``scores`` (R, C) and ``codes`` (R, C or 1, 4) of all its proposals."""
        results = []
        counts = [boxes.shape[0] for boxes in proposals]
        parts = zip(scores.split(counts), codes.split(counts), proposals, image_sizes, strict=True)
        for score, code, boxes, size in parts:
            values, rows, labels = best_entries(score, most=self.candidates, threshold=self.score_threshold)
            chosen = code[rows, torch.zeros_like(labels) if code.shape[1] == 1 else labels].float()
            found = clip_boxes_to_image(coder.decode_single(chosen, boxes[rows]), size)
            results.append(without_duplicates(found, values, labels, iou=self.nms, most=self.detections))
        return results
