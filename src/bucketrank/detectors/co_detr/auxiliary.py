"""The auxiliary heads over the encoder's maps: ATSS and Faster R-CNN, made of the parts of the detectors so named."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.image_list import ImageList

from bucketrank.catalogue import LossSettings
from bucketrank.detectors import box_head, rpn
from bucketrank.detectors.atss import ATSS, anchor_centerness, assign_anchors
from bucketrank.detectors.box_head import BoxHead
from bucketrank.detectors.co_detr.queries import Candidates
from bucketrank.detectors.criterion import Terms, build_criterion, named
from bucketrank.detectors.dense import compared
from bucketrank.detectors.dense_head import DenseHead
from bucketrank.detectors.rpn import RPN
from bucketrank.detectors.targets import Target
from bucketrank.ops.anchors import Anchors, octave

STRIDES = (8, 16, 32, 64, 128)
POOLED = STRIDES[:4]
# Weights of the published recipes: of the classification of a head under a ranking and a score-based loss...
RANKING_WEIGHT, SCORED_WEIGHT = 5.0, 12.0
# ... and of its boxes, beside that, where they are not balanced: 120 = 12 * 10 and 24 = 12 * 2.
ROI_BOX_WEIGHT, ATSS_BOX_WEIGHT = 10.0, 2.0


@dataclass(frozen=True)
class AuxiliarySettings:
    """What the auxiliary heads share. ``weight`` is that of their losses; None is the recipe's.

    ``sampling`` is for score-based training: whether Faster R-CNN has cross-entropy on a sample, or the decoder's loss
    on all candidates.
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
    """The head of ATSS, with one convolution a tower and one anchor a place."""

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
            quality=not self.criterion.ranking,
            prior=self.criterion.initial_score,
        )

    def forward(self, images: ImageList, maps: list[Tensor], truths: list[Target]) -> tuple[Terms, Candidates]:
        """The terms of the head, and the anchors with what the encoder says at their places."""
        output = self.head(maps)
        anchors = torch.cat(self.anchors(maps))
        valid = self.anchors.valid(anchors, images.image_sizes)
        matches = assign_anchors(anchors, valid, truths, per_level=output.per_level, topk=self.topk)
        found = compared(output, anchors, matches=matches, truths=truths, coder=self.coder, quality=anchor_centerness)
        places = torch.cat([part.flatten(2).transpose(1, 2) for part in maps], 1)  # (B, A, C), one anchor a place
        candidates = Candidates([anchors] * len(matches), list(places), matches)
        return named("atss", self.criterion(found)), candidates


class AuxiliaryRCNN(nn.Module):
    """The two stages of Faster R-CNN, with nine anchors a place.

    Score-based training is Co-DETR's: cross-entropy on a sample of 256 anchors and 512 proposals an image. Ranking
    losses take all.
    """

    def __init__(self, settings: AuxiliarySettings) -> None:
        super().__init__()
        loss = settings.loss.sampled() if settings.sampling else settings.loss
        proposing = replace(
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
            recipe=proposing,
        )
        deciding = replace(
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
            strides=POOLED,
            recipe=deciding,
        )

    def forward(self, images: ImageList, maps: list[Tensor], truths: list[Target]) -> tuple[Terms, Candidates]:
        """The terms of both stages, and the proposals with the mean of what was pooled for them."""
        proposals, terms = self.rpn(images, maps, truths)
        trained = self.roi.train_on(maps, proposals, truths, images.image_sizes)
        features = trained.pooled.mean((2, 3)).split([len(boxes) for boxes in trained.proposals])
        candidates = Candidates(trained.proposals, list(features), trained.matches)
        return named("rpn", terms) | named("roi", trained.terms), candidates


# To add an auxiliary head: write its class, and name it here.
AUXILIARY: dict[str, type[AuxiliaryRCNN | AuxiliaryATSS]] = {"faster_rcnn": AuxiliaryRCNN, "atss": AuxiliaryATSS}
