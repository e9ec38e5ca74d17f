"""The one-stage detectors: every anchor of every level ranked for each class."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.ssd import SSD

from bucketrank.integrations.ranking import Ranking
from bucketrank.integrations.torchvision.odds import log_odds
from bucketrank.integrations.torchvision.terms import head_terms, named

Targets = list[dict[str, Tensor]]


class Assignment:
    """What the anchors of a batch were matched to.

    ``labels`` (B, A) is the object's label, -1 for background, -2 for neither; ``positives`` (B, A) marks the former,
    and ``anchors`` (P, 4) and ``objects`` (P, 4) are the boxes of the positives and of their objects.
    """

    def __init__(self, targets: Targets, anchors: list[Tensor], matches: list[Tensor]) -> None:
        self.labels = torch.stack(matches)
        self.positives = self.labels >= 0
        objects = [match[match >= 0] for match in matches]
        self.labels[self.positives] = torch.cat([t["labels"][o] for t, o in zip(targets, objects, strict=True)])
        self.objects = torch.cat([t["boxes"][o] for t, o in zip(targets, objects, strict=True)])
        self.anchors = torch.stack(anchors)[self.positives]


class RankingRetinaNetHead(RetinaNetHead):
    """``RetinaNetHead`` with a ranking loss."""

    ranking: Ranking

    def compute_loss(
        self, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> dict[str, Tensor]:
        match = Assignment(targets, anchors, matched_idxs)
        codes = head_outputs["bbox_regression"][match.positives].float()
        boxes = self.regression_head.box_coder.decode_single(codes, match.anchors)
        logits = head_outputs["cls_logits"].flatten(0, 1)
        terms = head_terms(self.ranking, logits, match.labels.flatten(), boxes=boxes, objects=match.objects)
        return named(terms, "classification", "bbox_regression")


class RankingFCOSHead(FCOSHead):
    """``FCOSHead`` with a ranking loss; inference multiplies by the centre-ness, so that keeps its own loss."""

    ranking: Ranking

    def compute_loss(
        self, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> dict[str, Tensor]:
        match = Assignment(targets, anchors, matched_idxs)
        codes = head_outputs["bbox_regression"][match.positives].float()
        boxes = self.box_coder.decode(codes, match.anchors)
        logits = head_outputs["cls_logits"].flatten(0, 1)
        terms = head_terms(self.ranking, logits, match.labels.flatten(), boxes=boxes, objects=match.objects)

        # Only the centre-ness of the parent's losses is wanted: the others need no graph.
        centre = {name: output if name == "bbox_ctrness" else output.detach() for name, output in head_outputs.items()}
        own = super().compute_loss(targets, centre, anchors, matched_idxs)
        return named(terms, "classification", "bbox_regression") | {"bbox_ctrness": own["bbox_ctrness"]}


class RankingSSD(SSD):
    """``SSD`` with a ranking loss over the log-odds of its softmax, and without hard negative mining."""

    ranking: Ranking

    def compute_loss(
        self, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> dict[str, Tensor]:
        match = Assignment(targets, anchors, matched_idxs)
        codes = head_outputs["bbox_regression"][match.positives].float()
        boxes = self.box_coder.decode_single(codes, match.anchors)
        logits = log_odds(head_outputs["cls_logits"])[..., 1:].flatten(0, 1)
        columns = torch.where(match.positives, match.labels - 1, match.labels).flatten()  # without background's column
        terms = head_terms(self.ranking, logits, columns, boxes=boxes, objects=match.objects)
        return named(terms, "classification", "bbox_regression")
