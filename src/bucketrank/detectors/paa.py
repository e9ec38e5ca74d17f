"""PAA (Kim & Lee, ECCV 2020): a mixture of two Gaussians over the losses of candidates decides which are positive."""

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
    """PAA: the architecture of ATSS with another assignment. With score-based losses a branch predicts the IoU."""

    recipe = HeadRecipe(ranking_box_weight=1.0, scored_box_weight=1.3, quality_weight=0.5, prior=0.01)
    votes = True

    @torch.no_grad()
    def assign(self, output: DenseOutput, anchors: Tensor, valid: Tensor, ground_truths: list[Target]) -> list[Tensor]:
        matches = []
        for logits, box_deltas, valid_here, ground_truth in zip(
            output.logits, output.box_deltas, valid, ground_truths, strict=True
        ):
            nearest = assign_max_iou(
                anchors, ground_truth["boxes"], positive=0.1, negative=0.1, low_quality=0.0, valid=valid_here
            )
            losses = self.candidate_losses(logits.float(), box_deltas.float(), anchors, nearest, ground_truth)
            matches.append(assign_paa(nearest, losses, per_level=output.per_level, topk=self.topk))
        return matches

    def candidate_losses(
        self, logits: Tensor, box_deltas: Tensor, anchors: Tensor, nearest: Tensor, ground_truth: Target
    ) -> Tensor:
        """Return the focal plus GIoU loss (A,) of each candidate for its nearest object, whatever the training loss."""
        losses = torch.zeros_like(anchors[:, 0])
        rows = torch.where(nearest >= 0)[0]
        objects, labels = ground_truth["boxes"][nearest[rows]], ground_truth["labels"][nearest[rows]]
        class_targets = torch.zeros_like(logits[rows]).scatter_(1, labels[:, None], 1.0)
        boxes = self.coder.decode_single(box_deltas[rows], anchors[rows])
        losses[rows] = sigmoid_focal_loss(logits[rows], class_targets).sum(1) + generalized_box_iou_loss(boxes, objects)
        return losses

    def quality(self, anchors: Tensor, boxes: Tensor, objects: Tensor) -> Tensor:
        return paired_iou(boxes, objects)

    def scores(self, output: DenseOutput) -> Tensor:
        scores = self.criterion.scores(output.logits)
        return scores if output.quality is None else (scores * output.quality.float().sigmoid()[..., None]).sqrt()
