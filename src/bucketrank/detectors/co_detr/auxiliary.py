"""The auxiliary heads over the encoder's maps, built from the parts of ATSS and Faster R-CNN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from bucketrank.catalogue import LossSettings
from bucketrank.detectors import box_head, rpn
from bucketrank.detectors.atss import ATSS, anchor_centerness, assign_anchors
from bucketrank.detectors.box_head import BoxHead
from bucketrank.detectors.co_detr.queries import Candidates
from bucketrank.detectors.criterion import LossTerms, build_criterion, named
from bucketrank.detectors.dense_detector import assigned_anchors
from bucketrank.detectors.dense_head import DenseHead
from bucketrank.detectors.rpn import RPN
from bucketrank.detectors.targets import Target
from bucketrank.ops.anchors import Anchors, octave
from bucketrank.ops.box_coder import BoxCoder

STRIDES = (8, 16, 32, 64, 128)
POOLED_STRIDES = STRIDES[:4]
# The published weight of a head, under a ranking loss and under a score-based loss.
RANKING_WEIGHT, SCORED_WEIGHT = 5.0, 12.0
# The published weights of the box losses, relative to the weight of the head: 120 = 12 * 10 and 24 = 12 * 2.
ROI_BOX_WEIGHT, ATSS_BOX_WEIGHT = 10.0, 2.0


@dataclass(frozen=True)
class AuxiliarySettings:
    """Settings that the auxiliary heads share. ``weight`` applies to their losses; None means the published weight.

    ``sampling`` applies to score-based losses: if true, Faster R-CNN trains with cross-entropy on a sample, otherwise
    with the decoder's loss on all candidates.
    """

    width: int
    num_classes: int
    loss: LossSettings
    size_divisor: int
    weight: float | None = None
    sampling: bool = True
    hidden: int = 1024
    proposals: int = 1000
    proposal_candidates: int = 4000
    topk: int = 9

    @property
    def ranking_weight(self) -> float:
        return RANKING_WEIGHT if self.weight is None else self.weight

    @property
    def scored_weight(self) -> float:
        return SCORED_WEIGHT if self.weight is None else self.weight


class AuxiliaryATSS(nn.Module):
    """The head of ATSS, with one convolution per tower and one anchor per location."""

    def __init__(self, settings: AuxiliarySettings) -> None:
        super().__init__()
        recipe = replace(
            ATSS.recipe,
            ranking_weight=settings.ranking_weight,
            scored_weight=settings.scored_weight,
            ranking_box_weight=ATSS_BOX_WEIGHT,
            scored_box_weight=ATSS_BOX_WEIGHT,
        )
        self.criterion = build_criterion(settings.loss, recipe)
        self.anchors = Anchors(STRIDES, scales=(8.0,), size_divisor=settings.size_divisor)
        self.coder = BoxCoder(weights=(10.0, 10.0, 5.0, 5.0))
        self.topk = settings.topk
        self.head = DenseHead(
            settings.width,
            num_classes=settings.num_classes,
            anchors=1,
            levels=len(STRIDES),
            convs=1,
            quality=self.criterion.quality_branch,
            prior=self.criterion.initial_score,
        )

    def forward(
        self, images: ImageList, maps: list[Tensor], ground_truths: list[Target]
    ) -> tuple[LossTerms, Candidates]:
        """Return the loss terms of the head, and the anchors with the encoder's features at their locations."""
        output = self.head(maps)
        anchors = torch.cat(self.anchors(maps))
        valid = self.anchors.valid(anchors, images.image_sizes)
        matches = assign_anchors(anchors, valid, ground_truths, per_level=output.per_level, topk=self.topk)
        assigned = assigned_anchors(
            output, anchors, matches=matches, ground_truths=ground_truths, coder=self.coder, quality=anchor_centerness
        )
        # (B, A, C): one anchor per location, so locations and anchors have the same order.
        features = torch.cat([level.flatten(2).transpose(1, 2) for level in maps], 1)
        candidates = Candidates([anchors] * len(matches), list(features), matches)
        return named("atss", self.criterion(assigned)), candidates


class AuxiliaryRCNN(nn.Module):
    """The two stages of Faster R-CNN, with nine anchors per location.

    With a score-based loss they train as in Co-DETR, with cross-entropy on a sample of 256 anchors and 512 proposals
    per image. With a ranking loss they train on all candidates.
    """

    def __init__(self, settings: AuxiliarySettings) -> None:
        super().__init__()
        loss = settings.loss.sampled() if settings.sampling else settings.loss
        rpn_recipe = replace(
            rpn.RECIPE,
            ranking_weight=rpn.RECIPE.ranking_weight * settings.ranking_weight,
            scored_weight=settings.scored_weight,
        )
        self.rpn = RPN(
            settings.width,
            loss=loss,
            strides=list(STRIDES),
            scales=octave(4, 3),
            proposals=settings.proposals,
            candidates=settings.proposal_candidates,
            size_divisor=settings.size_divisor,
            coder_weights=(1.0, 1.0, 1.0, 1.0),
            recipe=rpn_recipe,
        )
        roi_recipe = replace(
            box_head.RECIPE,
            ranking_weight=settings.ranking_weight,
            scored_weight=settings.scored_weight,
            box_loss="giou",
            scored_box_weight=ROI_BOX_WEIGHT,
        )
        self.roi = BoxHead(
            settings.width,
            num_classes=settings.num_classes,
            loss=loss,
            hidden=settings.hidden,
            strides=POOLED_STRIDES,
            recipe=roi_recipe,
        )

    def forward(
        self, images: ImageList, maps: list[Tensor], ground_truths: list[Target]
    ) -> tuple[LossTerms, Candidates]:
        """Return the loss terms of both stages, and the proposals with the mean of their pooled features."""
        proposals, terms = self.rpn(images, maps, ground_truths)
        step = self.roi.train_on(maps, proposals, ground_truths, images.image_sizes)
        features = step.pooled.mean((2, 3)).split([len(boxes) for boxes in step.proposals])
        candidates = Candidates(step.proposals, list(features), step.matches)
        return named("rpn", terms) | named("roi", step.terms), candidates


# To add an auxiliary head, write its class and add it here.
AUXILIARY: dict[str, type[AuxiliaryRCNN | AuxiliaryATSS]] = {"faster_rcnn": AuxiliaryRCNN, "atss": AuxiliaryATSS}
