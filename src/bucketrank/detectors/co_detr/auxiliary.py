"""The auxiliary heads of Co-DETR and Co-DINO (ATSS and Faster R-CNN), and the decoder queries from their positives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_convert

from bucketrank.detectors.anchors import Anchors, octave
from bucketrank.detectors.assignment import IGNORED, NEGATIVE, assign_atss
from bucketrank.detectors.atss import ATSS, anchor_centerness
from bucketrank.detectors.base import Target
from bucketrank.detectors.box_coder import BoxCoder
from bucketrank.detectors.co_detr.decoder import BoxEncoding, Queries
from bucketrank.detectors.co_detr.transformer import EDGE
from bucketrank.detectors.criterion import HeadRecipe, LossTerms, build_criterion, named
from bucketrank.detectors.dense import DenseHead, assigned_anchors
from bucketrank.detectors.layers import initialise_linears
from bucketrank.detectors.rcnn import BOX_HEAD_RECIPE, RPN, RPN_RECIPE, BoxHead
from bucketrank.settings import LossSettings
from bucketrank.settings.detector_specs import CollaborativeSettings

MIN_QUERIES = 9  # minimum queries per head and image, so that a batch without objects has some, too
PADDING = -1  # row index of a query without a candidate


@dataclass(frozen=True)
class Candidates:
    """The candidates that an auxiliary head was trained on, per image."""

    boxes: list[Tensor]  # (A, 4) in pixels
    features: list[Tensor]  # (A, C) encoder features
    matches: list[Tensor]  # (A,) object index of each candidate, NEGATIVE or IGNORED


class AuxiliaryQueries(nn.Module):
    """The queries of one auxiliary head, many per object and assigned in advance, for the shared decoder.

    In Co-DETR, the head's features and a mark of the head are added to the encoded boxes: ``marks`` is 1 number for all
    channels, or one for each. Co-DINO has no marks (0), and its content is only the encoded box.
    """

    def __init__(self, width: int, *, limit: int, marks: int) -> None:
        super().__init__()
        self.limit = limit
        self.encoding = BoxEncoding(width, vectors=2 if marks else 1)
        self.head = None
        if marks:
            self.project = nn.Linear(width, width)
            self.norm = nn.LayerNorm(width)
            self.head = nn.Parameter(torch.randn(marks))
            initialise_linears(self.project)

    def forward(self, candidates: Candidates, image_sizes: list[tuple[int, int]]) -> tuple[Queries, list[Tensor]]:
        """Build K queries for each image; also return their object indices (K,) per image."""
        drawn = draw(candidates.matches, limit=self.limit)
        boxes, features, matches = [], [], []
        for number, (rows, (height, width)) in enumerate(zip(drawn, image_sizes, strict=True)):
            own, missing = rows[rows != PADDING], int((rows == PADDING).sum())
            scale = candidates.boxes[number].new_tensor([width, height, width, height])
            relative_boxes = box_convert(candidates.boxes[number][own].detach() / scale, "xyxy", "cxcywh").float()
            boxes.append(torch.cat([relative_boxes, relative_boxes.new_tensor([0.5, 0.5, 1, 1]).expand(missing, 4)]))
            feature = candidates.features[number][own]
            features.append(torch.cat([feature, feature.new_zeros(missing, feature.shape[1])]))
            match = candidates.matches[number][own]
            matches.append(torch.cat([match, match.new_full((missing,), IGNORED)]))
        # An anchor may extend beyond its image.
        initial = torch.stack(boxes).clamp(EDGE, 1 - EDGE)
        if self.head is None:
            (content,) = self.encoding(initial)
            return Queries(content, None, initial), matches
        positions, content = self.encoding(initial)
        content = content + self.norm(self.project(torch.stack(features)))
        return Queries(content, positions + self.head, initial), matches


def draw(matches: list[Tensor], *, limit: int) -> list[Tensor]:
    """Select the rows (K,) per image of the candidates that become queries: positives, then negatives.

    K is the same for all images: the maximum number of positives per image, but at least ``MIN_QUERIES`` and at most
    ``limit``. With more positives than K, a random subset is drawn; with fewer, random negatives fill up. If there are
    not enough candidates, the remaining rows are ``PADDING``.
    """
    positives = [torch.where(match >= 0)[0] for match in matches]
    negatives = [torch.where(match == NEGATIVE)[0] for match in matches]
    count = min(max([MIN_QUERIES, *map(len, positives)]), limit)
    drawn = []
    for positive, negative in zip(positives, negatives, strict=True):
        rows = _random_subset(positive, count)
        rows = torch.cat([rows, _random_subset(negative, count - len(rows))])
        drawn.append(torch.cat([rows, rows.new_full((count - len(rows),), PADDING)]))
    return drawn


def _random_subset(rows: Tensor, count: int) -> Tensor:
    return rows[torch.randperm(len(rows), device=rows.device)[:count]] if len(rows) > count else rows


# Published head weights under a ranking loss and under a score-based loss.
RANKING_WEIGHT, SCORED_WEIGHT = 5.0, 12.0
# Published box loss weights relative to the head weight: 120 = 12 * 10 and 24 = 12 * 2.
ROI_BOX_WEIGHT, ATSS_BOX_WEIGHT = 10.0, 2.0


def weighted(recipe: HeadRecipe, settings: CollaborativeSettings) -> HeadRecipe:
    """Multiply the weights of a head by those of the settings, or by the published ones."""
    weight = settings.auxiliary_weight
    ranking, scored = (RANKING_WEIGHT, SCORED_WEIGHT) if weight is None else (weight, weight)
    return replace(recipe, ranking_weight=ranking * recipe.ranking_weight, scored_weight=scored * recipe.scored_weight)


class AuxiliaryATSS(nn.Module):
    """The ATSS head, with one convolution per tower and one anchor per location."""

    def __init__(
        self,
        settings: CollaborativeSettings,
        *,
        num_classes: int,
        loss: LossSettings,
        strides: tuple[int, ...],
        size_divisor: int,
    ) -> None:
        super().__init__()
        recipe = replace(ATSS.recipe, ranking_box_weight=ATSS_BOX_WEIGHT, scored_box_weight=ATSS_BOX_WEIGHT)
        self.criterion = build_criterion(loss, weighted(recipe, settings))
        self.anchors = Anchors(strides, scales=(8.0,), size_divisor=size_divisor)
        self.coder = BoxCoder(weights=(10.0, 10.0, 5.0, 5.0))
        self.topk = settings.topk
        self.head = DenseHead(
            settings.channels,
            num_classes=num_classes,
            anchors=1,
            levels=len(strides),
            convs=1,
            quality=self.criterion.quality_branch,
            prior=self.criterion.initial_score,
        )

    def forward(
        self, images: ImageList, maps: list[Tensor], ground_truths: list[Target]
    ) -> tuple[LossTerms, Candidates]:
        """Compute the loss terms; also return the anchors with the encoder features at their locations."""
        output = self.head(maps)
        anchors = torch.cat(self.anchors(maps))
        valid = self.anchors.valid(anchors, images.image_sizes)
        objects = [each["boxes"] for each in ground_truths]
        matches = list(assign_atss(anchors, objects, per_level=output.per_level, topk=self.topk, valid=valid))
        assigned = assigned_anchors(
            output, anchors, matches=matches, ground_truths=ground_truths, coder=self.coder, quality=anchor_centerness
        )
        # (B, A, C); with one anchor per location, locations and anchors have the same order.
        features = torch.cat([level.flatten(2).transpose(1, 2) for level in maps], 1)
        candidates = Candidates([anchors] * len(matches), list(features), matches)
        return named("atss", self.criterion(assigned)), candidates


class AuxiliaryRCNN(nn.Module):
    """Faster R-CNN (both stages), with nine anchors per location.

    A score-based loss trains them as in Co-DETR, with cross-entropy on a sample of 256 anchors and 512 proposals per
    image, unless ``settings.sampling`` is off. A ranking loss trains them on all candidates. The coarsest of the maps
    with these ``strides`` is not pooled.
    """

    def __init__(
        self,
        settings: CollaborativeSettings,
        *,
        num_classes: int,
        loss: LossSettings,
        strides: tuple[int, ...],
        size_divisor: int,
    ) -> None:
        super().__init__()
        loss = loss.sampled() if settings.sampling else loss
        self.rpn = RPN(
            settings.channels,
            loss=loss,
            strides=list(strides),
            scales=octave(4, 3),
            proposals=settings.proposals,
            candidates=settings.proposal_candidates,
            size_divisor=size_divisor,
            coder_weights=(1.0, 1.0, 1.0, 1.0),
            recipe=weighted(RPN_RECIPE, settings),
        )
        self.roi = BoxHead(
            settings.channels,
            num_classes=num_classes,
            loss=loss,
            hidden=settings.hidden,
            strides=strides[:-1],
            recipe=weighted(replace(BOX_HEAD_RECIPE, box_loss="giou", scored_box_weight=ROI_BOX_WEIGHT), settings),
        )

    def forward(
        self, images: ImageList, maps: list[Tensor], ground_truths: list[Target]
    ) -> tuple[LossTerms, Candidates]:
        """Compute the loss terms of both stages; also return the proposals with their mean pooled features."""
        proposals, terms = self.rpn(images, maps, ground_truths)
        step = self.roi.train_on(maps, proposals, ground_truths, images.image_sizes)
        features = step.pooled.mean((2, 3)).split([len(boxes) for boxes in step.proposals])
        candidates = Candidates(step.proposals, list(features), step.matches)
        return named("rpn", terms) | named("roi", step.terms), candidates


# A new auxiliary head needs a class and an entry here.
AUXILIARY: dict[str, type[AuxiliaryRCNN | AuxiliaryATSS]] = {"faster_rcnn": AuxiliaryRCNN, "atss": AuxiliaryATSS}
