"""RetinaNet, FCOS and SSD: one ranking over all anchors of all levels and images and over all classes."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.ssd import SSD

from bucketrank.integrations.ranking_loss import RankingLoss
from bucketrank.integrations.torchvision.head_terms import head_terms, named
from bucketrank.integrations.torchvision.labels import check_labels
from bucketrank.integrations.torchvision.log_odds import log_odds

Targets = list[dict[str, Tensor]]


class AnchorMatches:
    """The objects that the A anchors of a batch of B images are matched to; P anchors are positive.

    ``labels`` (B, A) is the label of the matched object, -1 for background and -2 for ignored anchors. ``positives``
    (B, A) marks the anchors with an object. ``anchors`` (P, 4) and ``objects`` (P, 4) are the boxes of the positives
    and of their objects.
    """

    def __init__(self, targets: Targets, anchors: list[Tensor], matches: list[Tensor]) -> None:
        self.labels = torch.stack(matches)
        self.positives = self.labels >= 0
        objects = [match[match >= 0] for match in matches]
        labels = torch.cat([t["labels"][o] for t, o in zip(targets, objects, strict=True)])
        self.labels[self.positives] = labels.to(self.labels.dtype)
        self.objects = torch.cat([t["boxes"][o] for t, o in zip(targets, objects, strict=True)])
        self.anchors = torch.stack(anchors)[self.positives]


class RankingRetinaNetHead(RetinaNetHead):
    """``RetinaNetHead`` with a ranking loss."""

    ranking_loss: RankingLoss

    def compute_loss(
        self, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> dict[str, Tensor]:
        check_labels(targets, first=0, last=head_outputs["cls_logits"].shape[-1] - 1)
        matches = AnchorMatches(targets, anchors, matched_idxs)
        deltas = head_outputs["bbox_regression"][matches.positives].float()
        boxes = self.regression_head.box_coder.decode_single(deltas, matches.anchors)
        logits = head_outputs["cls_logits"].flatten(0, 1)
        terms = head_terms(self.ranking_loss, logits, matches.labels.flatten(), boxes=boxes, objects=matches.objects)
        return named(terms, "classification", "bbox_regression")


class RankingFCOSHead(FCOSHead):
    """``FCOSHead`` with a ranking loss. Inference multiplies scores by the centerness, which keeps its own loss."""

    ranking_loss: RankingLoss

    def compute_loss(
        self, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> dict[str, Tensor]:
        check_labels(targets, first=0, last=head_outputs["cls_logits"].shape[-1] - 1)
        matches = AnchorMatches(targets, anchors, matched_idxs)
        deltas = head_outputs["bbox_regression"][matches.positives].float()
        boxes = self.box_coder.decode(deltas, matches.anchors)
        logits = head_outputs["cls_logits"].flatten(0, 1)
        terms = head_terms(self.ranking_loss, logits, matches.labels.flatten(), boxes=boxes, objects=matches.objects)

        # Of the parent's losses only the centerness is used. The other outputs are detached to save their graph.
        outputs = {name: value if name == "bbox_ctrness" else value.detach() for name, value in head_outputs.items()}
        own = super().compute_loss(targets, outputs, anchors, matched_idxs)
        return named(terms, "classification", "bbox_regression") | {"bbox_ctrness": own["bbox_ctrness"]}


class RankingSSD(SSD):
    """``SSD`` with a ranking loss over the log-odds of its softmax, and without hard negative mining."""

    ranking_loss: RankingLoss

    def compute_loss(
        self, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> dict[str, Tensor]:
        check_labels(targets, first=1, last=head_outputs["cls_logits"].shape[-1] - 1)
        matches = AnchorMatches(targets, anchors, matched_idxs)
        deltas = head_outputs["bbox_regression"][matches.positives].float()
        boxes = self.box_coder.decode_single(deltas, matches.anchors)
        logits = log_odds(head_outputs["cls_logits"])[..., 1:].flatten(0, 1)
        columns = torch.where(matches.positives, matches.labels - 1, matches.labels).flatten()  # no background column
        terms = head_terms(self.ranking_loss, logits, columns, boxes=boxes, objects=matches.objects)
        return named(terms, "classification", "bbox_regression")
