"""The region proposal network (RPN): one ranking over all anchors of the batch, without sampling."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork

from bucketrank.integrations.ranking_loss import RankingLoss
from bucketrank.integrations.torchvision.head_terms import BACKGROUND, IGNORED, head_terms, named
from bucketrank.integrations.torchvision.relative_boxes import relative_boxes

HEAD_WEIGHT = 0.2  # multiplies all terms of the RPN, as in the published recipes


class RankingRPN(RegionProposalNetwork):
    """``RegionProposalNetwork`` with a ranking loss."""

    ranking_loss: RankingLoss

    def compute_loss(
        self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        anchor_labels = torch.cat(labels)  # 1 object, 0 background, -1 ignored
        columns = torch.zeros_like(anchor_labels, dtype=torch.int64).masked_fill(anchor_labels == 0, BACKGROUND)
        columns = columns.masked_fill(anchor_labels < 0, IGNORED)
        positives = torch.where(columns >= 0)[0]
        boxes = relative_boxes(self.box_coder, pred_bbox_deltas[positives])
        objects = relative_boxes(self.box_coder, torch.cat(regression_targets)[positives])
        terms = head_terms(self.ranking_loss, objectness.reshape(-1, 1), columns, boxes=boxes, objects=objects)
        return terms, terms["box"]

    def forward(
        self, images: ImageList, features: dict[str, Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        boxes, losses = super().forward(images, features, targets)
        if losses:  # the parent stores the dict of terms from compute_loss as "loss_objectness"
            losses = named(losses["loss_objectness"], "loss_objectness", "loss_rpn_box_reg", weight=HEAD_WEIGHT)
        return boxes, losses
