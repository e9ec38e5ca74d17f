"""Two-stage detectors: Faster R-CNN (Ren et al., NeurIPS 2015) and Cascade R-CNN (Cai & Vasconcelos, CVPR 2018).

The file follows the data: candidate sampling, RPN, RoIAlign, box head, and the detectors. Cross-entropy trains on a
balanced sample of the candidates, ranking losses on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead, concat_box_prediction_layers
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image, roi_align
from torchvision.ops._utils import convert_boxes_to_roi_format
from torchvision.ops.poolers import _onnx_merge_levels, initLevelMapper

from bucketrank.detectors.anchors import Anchors
from bucketrank.detectors.assignment import IGNORED, NEGATIVE, assign_max_iou
from bucketrank.detectors.assignment.max_iou import assign_each_image
from bucketrank.detectors.base import Detector, Target
from bucketrank.detectors.box_coder import BoxCoder
from bucketrank.detectors.criterion import Assigned, HeadRecipe, LossTerms, build_criterion, named
from bucketrank.detectors.dense import Decoded, detect
from bucketrank.detectors.layers import FeaturePyramid, initialise_classifier, initialise_linears
from bucketrank.evaluation.calibration.mapping import ScoreHead
from bucketrank.settings import LossSettings
from bucketrank.settings.detector_specs import CascadeRCNNSettings, RCNNSettings


@dataclass(frozen=True)
class CandidateSampler:
    """Sample up to ``count`` candidates per image, up to ``positive_fraction`` of them positive."""

    count: int
    positive_fraction: float

    def rows(self, match: Tensor) -> Tensor:
        """Sample rows (K,) of one image, in ascending order; ``match`` (A,) is its assignment.

        With the same seed it draws the same candidates as torchvision's ``BalancedPositiveNegativeSampler``.
        """
        positive, negative = torch.where(match >= 0)[0], torch.where(match == NEGATIVE)[0]
        positive = _random_subset(positive, int(self.count * self.positive_fraction))
        negative = _random_subset(negative, self.count - len(positive))
        return torch.cat([positive, negative]).sort().values

    def subsample(self, match: Tensor) -> Tensor:
        """Set the candidates of one image that are not sampled to IGNORED."""
        rows = self.rows(match)
        return torch.full_like(match, IGNORED).scatter_(0, rows, match[rows])


def _random_subset(rows: Tensor, count: int) -> Tensor:
    return rows[torch.randperm(len(rows), device=rows.device)[:count]]


RPN_RECIPE = HeadRecipe(ranking_weight=0.2, box_loss="l1", min_iou=0.7, samples=True)
TEST_CANDIDATES = 1000  # top-k scores per level that enter NMS when testing
NMS_IOU = 0.7
SAMPLED, SAMPLED_POSITIVES = 256, 0.5  # sampled anchors per image, and the maximum fraction of positives


class RPN(RegionProposalNetwork):
    """torchvision's RPN with our anchors, assignment and criterion."""

    def __init__(
        self,
        channels: int,
        *,
        loss: LossSettings,
        strides: list[int],
        proposals: int,
        size_divisor: int,
        scales: Sequence[float] = (8.0,),
        border: int | None = None,
        test_proposals: int = 1000,
        candidates: int = 2000,
        coder_weights: tuple[float, float, float, float] | None = None,
        recipe: HeadRecipe = RPN_RECIPE,
    ) -> None:
        ratios = (0.5, 1.0, 2.0)
        anchors = Anchors(strides, scales=scales, ratios=ratios, size_divisor=size_divisor, border=border)
        super().__init__(
            anchors,
            RPNHead(channels, len(scales) * len(ratios)),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=SAMPLED,
            positive_fraction=SAMPLED_POSITIVES,
            pre_nms_top_n={"training": candidates, "testing": TEST_CANDIDATES},
            post_nms_top_n={"training": proposals, "testing": test_proposals},
            nms_thresh=NMS_IOU,
        )
        self.sampler = CandidateSampler(SAMPLED, SAMPLED_POSITIVES)
        self.criterion = build_criterion(loss, recipe)
        initialise_classifier(self.head.cls_logits, self.criterion.initial_score)
        # GIoU compares decoded boxes, L1 compares deltas; the published delta weights differ.
        published = (10.0, 10.0, 5.0, 5.0) if self.criterion.box_loss == "giou" else (1.0, 1.0, 1.0, 1.0)
        self.box_coder = BoxCoder(weights=coder_weights or published)

    def forward(
        self, images: ImageList, features: list[Tensor], ground_truths: list[Target] | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the proposals of each image and, given ``ground_truths``, the loss terms."""
        objectness, level_deltas = self.head(features)
        per_level = [level[0].numel() for level in objectness]
        logits, box_deltas = concat_box_prediction_layers(objectness, level_deltas)
        anchors = torch.cat(self.anchor_generator(features))
        count = len(images.image_sizes)
        decoded = self.box_coder.decode_single(box_deltas.detach().float(), anchors.repeat(count, 1))
        proposals, _ = self.filter_proposals(
            decoded.reshape(count, -1, 4), logits.detach().float(), images.image_sizes, per_level
        )
        if ground_truths is None:
            return proposals, {}
        valid = self.anchor_generator.valid(anchors, images.image_sizes)
        matches = assign_each_image(anchors, ground_truths, valid, positive=0.7, negative=0.3, low_quality=0.3)
        if self.criterion.samples:
            matches = [self.sampler.subsample(match) for match in matches]
        one_class = [each | {"labels": torch.zeros_like(each["labels"])} for each in ground_truths]
        assigned = Assigned.from_candidates(
            logits,
            box_deltas,
            candidates=[anchors] * count,
            matches=matches,
            ground_truths=one_class,
            coder=self.box_coder,
        )
        return proposals, self.criterion(assigned)


STRIDES = (4, 8, 16, 32)  # P2 to P5; proposals are not pooled from P6
BOX_HEAD_RECIPE = HeadRecipe(box_loss="l1", samples=True, softmax=True)


@dataclass(frozen=True)
class BoxHeadStep:
    """Results of a box head's training step, for the next heads. R rows cover all images."""

    terms: LossTerms
    assigned: Assigned
    box_deltas: Tensor  # (R, C or 1, 4) without gradient
    proposals: list[Tensor]  # training boxes per image: proposals and ground-truth boxes
    matches: list[Tensor]  # object index of each box per image, NEGATIVE or IGNORED
    proposal_rows: list[slice | Tensor]  # rows of the proposals per image, without the ground-truth boxes
    pooled: Tensor  # (R, channels, 7, 7) features


class RoIPool(MultiScaleRoIAlign):
    """Multi-scale RoIAlign with fixed strides; a box of 224 x 224 pixels is pooled at stride 16.

    ``"published"`` shifts the box by half a cell, so that a cell's value lies at its centre, and takes about one sample
    per map cell. ``"torchvision"`` does not shift the box and always takes 2 x 2 samples, as torchvision's weights
    require.

    torchvision derives the strides from the first batch and keeps them. If its images are hardly larger than a cell,
    the strides are wrong for every later batch.
    """

    def __init__(self, strides: Sequence[int], *, size: int, roi_align: str = "published") -> None:
        super().__init__([str(level) for level in range(len(strides))], output_size=size, sampling_ratio=2)
        self.scales = [1 / stride for stride in strides]
        self.map_levels = initLevelMapper(strides[0].bit_length() - 1, strides[-1].bit_length() - 1)
        self.roi_align = roi_align

    def forward(self, features: list[Tensor], boxes: list[Tensor], image_sizes: list[tuple[int, int]]) -> Tensor:
        """Pool features (R, channels, size, size) for the boxes of all images."""
        if self.roi_align == "published":
            return self._aligned(features, boxes)
        pooled: Tensor = super().forward(dict(zip(self.featmap_names, features, strict=False)), boxes, image_sizes)
        return pooled

    def _aligned(self, features: list[Tensor], boxes: list[Tensor]) -> Tensor:
        rois, levels = convert_boxes_to_roi_format(boxes), self.map_levels(boxes)
        tracing = torchvision._is_tracing()
        pooled = features[0].new_zeros((len(rois), features[0].shape[1], *self.output_size))
        parts = []
        for level, (feature, scale) in enumerate(zip(features, self.scales, strict=False)):
            rows = torch.where(levels == level)[0]
            part = roi_align(feature, rois[rows], self.output_size, scale, sampling_ratio=0, aligned=True)
            if tracing:
                parts.append(part.to(pooled.dtype))
            else:
                pooled[rows] = part.to(pooled.dtype)
        return _onnx_merge_levels(levels, parts) if tracing else pooled


class BoxHead(nn.Module):
    """Box head: RoIAlign, two hidden layers, a classifier and a box regressor."""

    def __init__(
        self,
        channels: int,
        *,
        num_classes: int,
        loss: LossSettings,
        hidden: int = 1024,
        class_agnostic: bool = False,
        positive_iou: float = 0.5,
        low_quality: bool = False,
        coder_weights: tuple[float, float, float, float] = (10.0, 10.0, 5.0, 5.0),
        strides: Sequence[int] = STRIDES,
        roi_align: str = "published",
        recipe: HeadRecipe = BOX_HEAD_RECIPE,
    ) -> None:
        super().__init__()
        self.num_classes, self.positive_iou = num_classes, positive_iou
        self.low_quality = positive_iou if low_quality else None  # IoU from which an object claims its best proposal
        self.criterion = build_criterion(loss, recipe)
        self.coder = BoxCoder(weights=coder_weights)
        self.sampler = CandidateSampler(512, 0.25)
        self.pool = RoIPool(strides, size=7, roi_align=roi_align)
        self.layers = TwoMLPHead(channels * 7 * 7, hidden)
        self.classes = nn.Linear(hidden, num_classes + (1 if self.criterion.softmax else 0))
        self.boxes = nn.Linear(hidden, 4 * (1 if class_agnostic else num_classes))
        initialise_linears(self.layers)
        initialise_classifier(self.classes, self.criterion.initial_score)
        nn.init.normal_(self.boxes.weight, std=0.001)
        nn.init.zeros_(self.boxes.bias)

    def forward(
        self, features: list[Tensor], proposals: list[Tensor], image_sizes: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Predict logits (R, C) and box deltas (R, C or 1, 4) for the proposals of all images."""
        return self.predict(self.pool(features, proposals, image_sizes))

    def predict(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Predict logits and box deltas from pooled features (R, channels, 7, 7)."""
        hidden = self.layers(pooled)
        return self.classes(hidden), self.boxes(hidden).reshape(-1, self.boxes.out_features // 4, 4)

    def train_on(
        self,
        features: list[Tensor],
        proposals: list[Tensor],
        ground_truths: list[Target],
        image_sizes: list[tuple[int, int]],
    ) -> BoxHeadStep:
        """Add the ground-truth boxes to the proposals, assign objects to them and compute the loss."""
        candidates, matches = [], []
        proposal_rows: list[slice | Tensor] = []
        numbers = torch.arange(max(len(each["boxes"]) for each in ground_truths), device=proposals[0].device)
        for boxes, ground_truth in zip(proposals, ground_truths, strict=True):
            objects = ground_truth["boxes"]
            extended = torch.cat([boxes, objects.to(boxes.dtype)])
            assigned_boxes = assign_max_iou(
                boxes, objects, positive=self.positive_iou, negative=self.positive_iou, low_quality=self.low_quality
            )
            # A ground-truth box belongs to its own object, also if another object has the same box.
            match = torch.cat([assigned_boxes, numbers[: len(objects)]])
            proposed: slice | Tensor = slice(len(boxes))
            if self.criterion.samples:
                drawn = self.sampler.rows(match)
                extended, match, proposed = extended[drawn], match[drawn], drawn < len(boxes)
            candidates.append(extended)
            matches.append(match)
            proposal_rows.append(proposed)
        pooled = self.pool(features, candidates, image_sizes)
        logits, box_deltas = self.predict(pooled)
        assigned = Assigned.from_candidates(
            logits, box_deltas, candidates=candidates, matches=matches, ground_truths=ground_truths, coder=self.coder
        )
        return BoxHeadStep(
            terms=self.criterion(assigned),
            assigned=assigned,
            box_deltas=box_deltas.detach(),
            proposals=candidates,
            matches=matches,
            proposal_rows=proposal_rows,
            pooled=pooled,
        )

    def refined(self, box_deltas: Tensor, proposals: list[Tensor], image_sizes: list[tuple[int, int]]) -> list[Tensor]:
        """Refine the proposals of each image by the deltas (R, 1, 4) of a class-agnostic head."""
        boxes = self.coder.decode_single(box_deltas[:, 0].detach().float(), torch.cat(proposals))
        split = boxes.split([part.shape[0] for part in proposals])
        return [clip_boxes_to_image(part, size) for part, size in zip(split, image_sizes, strict=True)]


class RCNN(Detector):
    """Base class of the R-CNNs: a pyramid from P2 to P6 and an RPN; a subclass adds the heads."""

    border: int | None = None  # maximum distance in pixels of a training anchor beyond its image; None: no limit

    def __init__(self, num_classes: int, *, loss: LossSettings, settings: RCNNSettings, **shared: Any) -> None:
        super().__init__(num_classes, **shared)
        self.neck = FeaturePyramid(self.backbone.channels, settings.channels, extra="pool")
        self.rpn = RPN(
            settings.channels,
            loss=loss,
            strides=self.neck.strides,
            proposals=settings.proposals,
            candidates=settings.proposal_candidates,
            test_proposals=settings.test_proposals,
            size_divisor=self.size_divisor,
            border=self.border,
        )
        self.roi_align = settings.roi_align
        self.score_threshold, self.nms, self.detections = settings.score_threshold, settings.nms, settings.detections

    def scoring_heads(self) -> Sequence[BoxHead]:
        """Return the box heads whose mean logits become the detection scores."""
        raise NotImplementedError

    def score_head(self) -> ScoreHead:
        heads = self.scoring_heads()
        layers = tuple(head.classes for head in heads)
        if heads[-1].criterion.softmax:
            return ScoreHead("softmax", layers=layers, columns=self.num_classes + 1, background=self.num_classes)
        thresholds = ((self, "score_threshold"),)
        return ScoreHead("sigmoid", layers=layers, columns=self.num_classes, thresholds=thresholds)

    def detections_of(
        self,
        scores: Tensor,
        box_deltas: Tensor,
        proposals: list[Tensor],
        image_sizes: list[tuple[int, int]],
        coder: BoxCoder,
    ) -> list[dict[str, Tensor]]:
        """Postprocess ``scores`` (R, C) and ``box_deltas`` (R, C or 1, 4) of all proposals to detections per image."""
        counts = [boxes.shape[0] for boxes in proposals]
        parts = zip(scores.split(counts), box_deltas.split(counts), proposals, image_sizes, strict=True)
        limits = {"threshold": self.score_threshold, "iou": self.nms}
        return [
            detect(score, Decoded(deltas, boxes, coder, size), limit=self.detections, **limits)
            for score, deltas, boxes, size in parts
        ]


class FasterRCNN(RCNN):
    """Faster R-CNN. Ranking losses train on all proposals, cross-entropy on a sample of 512 per image."""

    low_quality = False  # whether an object claims its best proposal from another object

    def __init__(self, num_classes: int, *, loss: LossSettings, settings: RCNNSettings, **shared: Any) -> None:
        super().__init__(num_classes, loss=loss, settings=settings, **shared)
        self.box_head = BoxHead(
            settings.channels,
            num_classes=num_classes,
            loss=loss,
            hidden=settings.hidden,
            low_quality=self.low_quality,
            roi_align=settings.roi_align,
        )

    def scoring_heads(self) -> list[BoxHead]:
        return [self.box_head]

    def losses(self, images: ImageList, features: list[Tensor], ground_truths: list[Target]) -> dict[str, Tensor]:
        proposals, terms = self.rpn(images, features, ground_truths)
        step = self.box_head.train_on(features, proposals, ground_truths, images.image_sizes)
        extra = self.extra_losses(features, step, ground_truths, images.image_sizes)
        return named("rpn", terms) | named("roi", step.terms) | extra

    def extra_losses(
        self, features: list[Tensor], step: BoxHeadStep, ground_truths: list[Target], image_sizes: list[tuple[int, int]]
    ) -> dict[str, Tensor]:
        """Compute the loss terms of additional heads; none here."""
        return {}

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        proposals, _ = self.rpn(images, features)
        logits, box_deltas = self.box_head(features, proposals, images.image_sizes)
        scores = self.box_head.criterion.scores(logits)
        return self.detections_of(scores, box_deltas, proposals, images.image_sizes, self.box_head.coder)


# Published loss weight and box delta deviations (shifts, sizes) of each stage for score-based losses; later stages have
# smaller deltas. Ranking losses are self-balanced and compare decoded boxes.
STAGE_WEIGHTS = (1.0, 0.5, 0.25)
STAGE_DEVIATIONS = ((0.1, 0.2), (0.05, 0.1), (0.033, 0.067))


def _coder_weights(shift: float, size: float) -> tuple[float, float, float, float]:
    return 1 / shift, 1 / shift, 1 / size, 1 / size


class CascadeRCNN(RCNN):
    """Cascade R-CNN: three box heads. Each refines the boxes of the previous one and has a higher positive IoU."""

    border = 0

    def __init__(self, num_classes: int, *, loss: LossSettings, settings: CascadeRCNNSettings, **shared: Any) -> None:
        super().__init__(num_classes, loss=loss, settings=settings, **shared)
        ranking = self.rpn.criterion.ranking
        self.stages: Sequence[BoxHead] = nn.ModuleList(  # type: ignore[assignment]
            BoxHead(
                settings.channels,
                num_classes=num_classes,
                loss=loss,
                hidden=settings.hidden,
                class_agnostic=True,
                positive_iou=iou,
                coder_weights=_coder_weights(*STAGE_DEVIATIONS[0 if ranking else stage]),
                roi_align=settings.roi_align,
                recipe=replace(BOX_HEAD_RECIPE, box_loss="smooth_l1", scored_weight=STAGE_WEIGHTS[stage], min_iou=iou),
            )
            for stage, iou in enumerate(settings.stage_ious)
        )

    def scoring_heads(self) -> Sequence[BoxHead]:
        return self.stages

    def losses(self, images: ImageList, features: list[Tensor], ground_truths: list[Target]) -> dict[str, Tensor]:
        proposals, terms = self.rpn(images, features, ground_truths)
        losses = named("rpn", terms)
        for number, head in enumerate(self.stages, start=1):
            step = head.train_on(features, proposals, ground_truths, images.image_sizes)
            losses |= named(f"stage{number}", step.terms)
            refined = head.refined(step.box_deltas, step.proposals, images.image_sizes)
            # Drop the ground-truth boxes; the next stage adds them again.
            proposals = [boxes[rows] for boxes, rows in zip(refined, step.proposal_rows, strict=True)]
        return losses

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        proposals, _ = self.rpn(images, features)
        stage_logits = []
        for head in self.stages:
            boxes = proposals
            logits, box_deltas = head(features, boxes, images.image_sizes)
            stage_logits.append(logits.float())
            proposals = head.refined(box_deltas, boxes, images.image_sizes)
        scores = head.criterion.scores(torch.stack(stage_logits).mean(0))
        return self.detections_of(scores, box_deltas, boxes, images.image_sizes, head.coder)
