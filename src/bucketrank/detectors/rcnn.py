"""What the R-CNNs share: from scored proposals to detections."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import clip_boxes_to_image

from bucketrank.detectors.criterion import Terms
from bucketrank.detectors.detector import Detector
from bucketrank.detectors.neck import FeaturePyramid
from bucketrank.detectors.postprocess import best_entries, without_duplicates
from bucketrank.detectors.rpn import RPN
from bucketrank.detectors.settings import BackboneSettings, InputSettings, LossSettings


class RCNN(Detector):
    """A pyramid from P2 to P6 and a network that proposes; the heads over the proposals are the detector's own."""

    def __init__(
        self,
        num_classes: int,
        *,
        backbone: BackboneSettings,
        loss: LossSettings,
        inputs: InputSettings,
        channels: int,
        proposals: int,
        proposal_candidates: int,
        test_proposals: int,
        border: int | None,
        candidates: int,
        score_threshold: float,
        nms: float,
        detections: int,
    ) -> None:
        super().__init__(num_classes, backbone=backbone, inputs=inputs)
        self.neck = FeaturePyramid(self.backbone.channels, channels, first_level=2, extra="pool")
        self.rpn = RPN(
            channels,
            loss=loss,
            strides=self.neck.strides,
            proposals=proposals,
            candidates=proposal_candidates,
            test_proposals=test_proposals,
            size_divisor=self.size_divisor,
            border=border,
        )
        self.candidates, self.score_threshold = candidates, score_threshold
        self.nms, self.detections = nms, detections

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


def named(head: str, terms: Terms) -> Terms:
    """The terms of a head under its name."""
    return {f"{head}_{name}": term for name, term in terms.items()}
