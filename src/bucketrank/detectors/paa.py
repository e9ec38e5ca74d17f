"""PAA (Kim & Lee, ECCV 2020): positives chosen by a mixture of two Gaussians over the candidates' losses."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

from bucketrank.detectors.atss import ATSS
from bucketrank.detectors.criterion import HeadRecipe
from bucketrank.detectors.dense_head import DenseOutput
from bucketrank.detectors.targets import Target
from bucketrank.ops.assignment import assign_max_iou, assign_paa
from bucketrank.ops.boxes import paired_iou


class PAA(ATSS):
    """PAA: ATSS's architecture, another assignment; score-based losses have a branch that predicts the IoU."""

    recipe = HeadRecipe(ranking_box_weight=1.0, scored_box_weight=1.3, quality_weight=0.5, prior=0.01)
    votes = True

    @torch.no_grad()
    def assign(self, output: DenseOutput, anchors: Tensor, valid: Tensor, truths: list[Target]) -> list[Tensor]:
        matches = []
        for logits, codes, here, truth in zip(output.logits, output.codes, valid, truths, strict=True):
            near = assign_max_iou(anchors, truth["boxes"], positive=0.1, negative=0.1, low_quality=0.0, valid=here)
            losses = self.candidate_losses(logits.float(), codes.float(), anchors, near, truth)
            matches.append(assign_paa(near, losses, per_level=output.per_level, topk=self.topk))
        return matches

    def candidate_losses(self, logits: Tensor, codes: Tensor, anchors: Tensor, near: Tensor, truth: Target) -> Tensor:
        """(A,) how badly each candidate fits its object: focal plus GIoU loss, whatever loss trains the detector."""
        losses = torch.zeros_like(anchors[:, 0])
        rows = torch.where(near >= 0)[0]
        objects, labels = truth["boxes"][near[rows]], truth["labels"][near[rows]]
        wanted = torch.zeros_like(logits[rows]).scatter_(1, labels[:, None], 1.0)
        boxes = self.coder.decode_single(codes[rows], anchors[rows])
        losses[rows] = sigmoid_focal_loss(logits[rows], wanted).sum(1) + generalized_box_iou_loss(boxes, objects)
        return losses

    def quality(self, anchors: Tensor, boxes: Tensor, objects: Tensor) -> Tensor:
        return paired_iou(boxes, objects)

    def scores(self, output: DenseOutput) -> Tensor:
        scores = self.criterion.scores(output.logits)
        return scores if output.quality is None else (scores * output.quality.float().sigmoid()[..., None]).sqrt()
