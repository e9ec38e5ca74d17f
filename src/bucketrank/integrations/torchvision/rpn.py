"""The region proposal network: every anchor of the batch ranked, none sampled."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork

from bucketrank.integrations.ranking import Ranking
from bucketrank.integrations.torchvision.coding import relative_boxes
from bucketrank.integrations.torchvision.terms import BACKGROUND, IGNORED, head_terms, named

HEAD_WEIGHT = 0.2  # of all terms of this head, as in the published recipes


class RankingRPN(RegionProposalNetwork):
    """``RegionProposalNetwork`` with a ranking loss."""

    ranking: Ranking

    def compute_loss(
        self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        marks = torch.cat(labels)  # 1 object, 0 background, -1 in between
        columns = torch.zeros_like(marks, dtype=torch.int64).masked_fill(marks == 0, BACKGROUND)
        columns = columns.masked_fill(marks < 0, IGNORED)
        positives = torch.where(columns >= 0)[0]
        boxes = relative_boxes(self.box_coder, pred_bbox_deltas[positives])
        objects = relative_boxes(self.box_coder, torch.cat(regression_targets)[positives])
        terms = head_terms(self.ranking, objectness.reshape(-1, 1), columns, boxes=boxes, objects=objects)
        return terms, terms["box"]

    def forward(
        self, images: ImageList, features: dict[str, Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        boxes, losses = super().forward(images, features, targets)
        if losses:  # the parent has put what compute_loss returns under its own names
            losses = named(losses["loss_objectness"], "loss_objectness", "loss_rpn_box_reg", weight=HEAD_WEIGHT)
        return boxes, losses
