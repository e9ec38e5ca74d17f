"""PAA (Kim & Lee, ECCV 2020): a Gaussian mixture over the candidates' losses selects the positive anchors."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection._utils import _topk_min
from torchvision.ops import sigmoid_focal_loss

from bucketrank.boxes import giou_loss, paired_iou
from bucketrank.detectors.assignment import assign_paa
from bucketrank.detectors.assignment.max_iou import assign_each_image
from bucketrank.detectors.atss import ATSS
from bucketrank.detectors.base import Target
from bucketrank.detectors.criterion import Assigned, HeadRecipe
from bucketrank.detectors.dense import DenseOutput


class PAA(ATSS):
    """PAA: ATSS with another assignment, and an IoU branch instead of centerness under score-based losses."""

    recipe = HeadRecipe(ranking_box_weight=1.0, scored_box_weight=1.3, quality_weight=0.5, prior=0.01)
    votes = True

    @torch.no_grad()
    def assign(self, output: DenseOutput, anchors: Tensor, valid: Tensor, ground_truths: list[Target]) -> list[Tensor]:
        thresholds = {"positive": 0.1, "negative": 0.1, "low_quality": 0.0}
        nearest = torch.stack(assign_each_image(anchors, ground_truths, valid, **thresholds))
        losses = self.candidate_losses(output, anchors, nearest, ground_truths)
        max_objects = max(len(ground_truth["labels"]) for ground_truth in ground_truths)
        return list(assign_paa(nearest, losses, per_level=output.per_level, topk=self.topk, objects=max_objects))

    def candidate_losses(
        self, output: DenseOutput, anchors: Tensor, nearest: Tensor, ground_truths: list[Target]
    ) -> Tensor:
        """Compute focal plus GIoU loss (B, A) of each candidate for its nearest object, for any training loss.

        As published, the GIoU loss has its training weight under a score-based loss, 1.3 by default, and weight 1 under
        a ranking loss. ``nearest`` (B, A) assigns the candidates; other anchors have loss 0.
        """
        candidates = Assigned.from_candidates(
            output.logits.flatten(0, 1),
            output.box_deltas.flatten(0, 1),
            candidates=[anchors] * len(nearest),
            matches=list(nearest),
            ground_truths=ground_truths,
            coder=self.coder,
        )
        rows = candidates.rows
        logits = candidates.logits[rows]
        class_targets = torch.zeros_like(logits).scatter_(1, candidates.labels[rows, None], 1.0)
        losses = sigmoid_focal_loss(logits, class_targets).sum(1)
        weight = 1.0 if self.criterion.ranking else self.criterion.box_weight
        losses += weight * giou_loss(candidates.boxes, candidates.objects)
        return torch.zeros_like(anchors[:, 0]).repeat(len(nearest)).index_put_((rows,), losses).view_as(nearest)

    def quality(self, anchors: Tensor, boxes: Tensor, objects: Tensor) -> Tensor:
        return paired_iou(boxes, objects)

    def candidate_scores(self, class_scores: Tensor, scores: Tensor, per_level: list[int]) -> tuple[Tensor, Tensor]:
        # The published code takes the top-k anchors of each level by score times quality, with all their classes.
        first, parts = 0, []
        for best in scores.amax(1).split(per_level):
            parts.append(best.topk(_topk_min(best, self.candidates, 0)).indices + first)
            first += len(best)
        anchors = torch.cat(parts)
        selected = scores[anchors]
        return anchors, selected.where(selected > self.score_threshold, 0)

    def scores(self, output: DenseOutput) -> Tensor:
        scores = self.criterion.scores(output.logits)
        return scores if output.quality is None else (scores * output.quality.float().sigmoid()[..., None]).sqrt()
