"""One-stage detectors: the dense head, the detector base class, and postprocessing (top-k, NMS, score voting)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder, _topk_min
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import batched_nms, box_iou, clip_boxes_to_image, remove_small_boxes
from torchvision.ops.misc import Conv2dNormActivation

from bucketrank.detectors.anchors import Anchors
from bucketrank.detectors.base import Detector, Target
from bucketrank.detectors.criterion import Assigned, HeadRecipe, build_criterion
from bucketrank.detectors.criterion.base import Quality
from bucketrank.detectors.layers import initialise_classifier
from bucketrank.evaluation.calibration.mapping import ScoreHead
from bucketrank.settings import LossSettings
from bucketrank.settings.detector_specs import DenseSettings

MIN_SIDE = 1e-2  # minimum width and height of a detection, in pixels
FIRST_ENTRIES = 5000  # top-k scores that enter NMS at first
TRACED_ENTRIES = 20_000  # top-k scores that enter NMS in an exported graph, which cannot retry

# One box per row of a score matrix, or a function of rows and columns (K,) that returns their boxes (K, 4).
Boxes = Tensor | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Decoded:
    """Boxes decoded on demand from deltas (R, C or 1, 4) and proposals (R, 4), clipped to the image."""

    deltas: Tensor
    proposals: Tensor
    coder: BoxCoder
    size: tuple[int, int]

    def __call__(self, rows: Tensor, labels: Tensor) -> Tensor:
        deltas = self.deltas[rows, torch.zeros_like(labels) if self.deltas.shape[1] == 1 else labels].float()
        boxes: Tensor = clip_boxes_to_image(self.coder.decode_single(deltas, self.proposals[rows]), self.size)
        return boxes


def top_scores(scores: Tensor, *, limit: int, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Select the top-k of ``scores`` (R, C) above ``threshold``, k = ``limit``: values, rows and columns.

    The detectors' default threshold is 0: a ranking loss trains the order of the scores, not their values, so all
    scores may lie below a threshold that suits probabilities.
    """
    flat = scores.flatten()
    values, order = flat.topk(_topk_min(flat, limit, 0))
    above = values > threshold
    values, order = values[above], order[above]
    return values, order // scores.shape[1], order % scores.shape[1]


def detect(scores: Tensor, boxes: Boxes, *, threshold: float, iou: float, limit: int) -> dict[str, Tensor]:
    """Apply per-class NMS to all ``scores`` (R, C) above ``threshold`` and keep the top ``limit`` detections.

    A box never suppresses one of a higher score. So NMS among the top-k scores gives the same detections as NMS among
    all scores if ``limit`` of them survive; otherwise it is repeated with four times as many. The cost hardly depends
    on the number of classes: of the 1.2 million entries of 1000 proposals and 1203 LVIS classes, NMS compares a few
    thousand.
    """
    tracing = torchvision._is_tracing()
    entries = TRACED_ENTRIES if tracing else FIRST_ENTRIES
    while True:
        values, rows, labels = top_scores(scores, limit=entries, threshold=threshold)
        candidates = boxes[rows] if isinstance(boxes, Tensor) else boxes(rows, labels)
        detections = class_nms(candidates, values, labels, iou=iou, limit=limit)
        if tracing or len(detections["scores"]) >= limit or len(values) < entries:
            return detections
        entries *= 4


def class_nms(boxes: Tensor, scores: Tensor, labels: Tensor, *, iou: float, limit: int) -> dict[str, Tensor]:
    """Apply per-class NMS and keep the top ``limit`` detections; boxes smaller than MIN_SIDE are dropped."""
    solid = remove_small_boxes(boxes, MIN_SIDE)
    boxes, scores, labels = boxes[solid], scores[solid], labels[solid]
    keep = batched_nms(boxes, scores, labels, iou)[:limit]
    return {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}


def vote(detections: dict[str, Tensor], boxes: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """Refine detections by score voting (PAA): ``boxes`` (R, 4) vote with their ``scores`` (R, C); 0 is no vote.

    A detection becomes the mean of all boxes, weighted by ``score * exp(-(1 - IoU)^2 / 0.025)`` with the score for its
    class. Boxes with an IoU of 0.01 or less have no weight.
    """
    overlaps = box_iou(detections["boxes"], boxes)  # (detections, R)
    votes = scores.T[detections["labels"]] * torch.exp(-((1 - overlaps) ** 2) / 0.025)
    votes = votes * (overlaps > 0.01)
    # Autocast would multiply in half precision, which rounds boxes to several pixels.
    with torch.autocast(boxes.device.type, enabled=False):
        moved: Tensor = (votes @ boxes) / votes.sum(1, keepdim=True)
    return detections | {"boxes": moved}


@dataclass(frozen=True)
class DenseOutput:
    """Predictions for B images with A anchors each, level after level."""

    logits: Tensor  # (B, A, C)
    box_deltas: Tensor  # (B, A, 4)
    quality: Tensor | None  # (B, A) logits
    per_level: list[int]  # number of anchors per level


class DenseHead(nn.Module):
    """Two convolution towers, shared by all levels, predict logits, box deltas and optionally a quality per anchor."""

    def __init__(
        self,
        channels: int,
        *,
        num_classes: int,
        anchors: int,
        levels: int,
        convs: int = 4,
        normalise: bool = True,
        scale: bool = True,
        quality: bool = False,
        prior: float = 0.01,
    ) -> None:
        super().__init__()
        if normalise and channels % 32:
            raise ValueError(
                f"detector.channels: expected a multiple of 32, the groups of the head's norms, got {channels}"
            )
        # Use at least two channels per group, because the map of a small image may have a single cell.
        norm = (lambda width: nn.GroupNorm(min(32, width // 2), width)) if normalise else None
        towers = [[Conv2dNormActivation(channels, channels, norm_layer=norm) for _ in range(convs)] for _ in range(2)]
        self.class_tower, self.box_tower = (nn.Sequential(*tower) for tower in towers)
        self.classes = nn.Conv2d(channels, anchors * num_classes, 3, padding=1)
        self.boxes = nn.Conv2d(channels, anchors * 4, 3, padding=1)
        self.quality = nn.Conv2d(channels, anchors, 3, padding=1) if quality else None
        self.scales = nn.Parameter(torch.ones(levels)) if scale else None  # box delta scale per level
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.01)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        initialise_classifier(self.classes, prior)

    def forward(self, features: list[Tensor]) -> DenseOutput:
        logits, box_deltas, quality = [], [], []
        for level, feature in enumerate(features):
            hidden = self.box_tower(feature)
            logits.append(_by_anchor(self.classes(self.class_tower(feature)), self.classes.out_channels, self.boxes))
            deltas = self.boxes(hidden) if self.scales is None else self.boxes(hidden) * self.scales[level]
            box_deltas.append(_by_anchor(deltas, self.boxes.out_channels, self.boxes))
            if self.quality is not None:
                quality.append(_by_anchor(self.quality(hidden), self.quality.out_channels, self.boxes).squeeze(2))
        return DenseOutput(
            logits=torch.cat(logits, 1),
            box_deltas=torch.cat(box_deltas, 1),
            quality=torch.cat(quality, 1) if quality else None,
            per_level=[part.shape[1] for part in box_deltas],
        )


def _by_anchor(maps: Tensor, channels: int, boxes: nn.Conv2d) -> Tensor:
    """Reshape (B, anchors * K, H, W) to (B, H * W * anchors, K), in anchor order."""
    anchors = boxes.out_channels // 4
    return maps.permute(0, 2, 3, 1).reshape(maps.shape[0], -1, channels // anchors)


def assigned_anchors(
    output: DenseOutput,
    anchors: Tensor,
    *,
    matches: list[Tensor],
    ground_truths: list[Target],
    coder: BoxCoder,
    quality: Quality,
) -> Assigned:
    """Build the criterion's input from a dense head's output for ``anchors`` (A, 4), which all images share."""
    return Assigned.from_candidates(
        output.logits.flatten(0, 1),
        output.box_deltas.flatten(0, 1),
        candidates=[anchors] * len(matches),
        matches=matches,
        ground_truths=ground_truths,
        coder=coder,
        quality_logits=None if output.quality is None else output.quality.flatten(),
        quality=None if output.quality is None else quality,
    )


class DenseDetector(Detector):
    """Base class of one-stage detectors: a dense head over anchors and a criterion; a subclass adds the assignment."""

    recipe: HeadRecipe
    anchors: Anchors
    head: DenseHead
    coder: BoxCoder

    def __init__(
        self, num_classes: int, *, loss: LossSettings, settings: DenseSettings, vote: bool, **shared: Any
    ) -> None:
        super().__init__(num_classes, **shared)
        self.criterion = build_criterion(loss, self.recipe)
        self.backbone.freeze_only_finest()  # the pyramid starts at stride 8
        self.candidates, self.score_threshold = settings.candidates, settings.score_threshold
        self.nms, self.detections, self.vote = settings.nms, settings.detections, vote

    def assign(self, output: DenseOutput, anchors: Tensor, valid: Tensor, ground_truths: list[Target]) -> list[Tensor]:
        """Assign objects: per image the object index (A,) of every anchor, NEGATIVE or IGNORED; ``valid`` is (B, A)."""
        raise NotImplementedError

    def quality(self, anchors: Tensor, boxes: Tensor, objects: Tensor) -> Tensor:
        """Compute the quality branch targets (P,) of P positives."""
        raise NotImplementedError

    def scores(self, output: DenseOutput) -> Tensor:
        """Compute the scores (B, A, C) that rank detections."""
        return self.criterion.scores(output.logits)

    def score_head(self) -> ScoreHead:
        if self.head.quality is not None:
            return ScoreHead(
                "other",
                reason="its score is a class score times a predicted quality, so that a map of the class score would "
                "change the order of detections",
            )
        return ScoreHead(
            "sigmoid",
            layers=(self.head.classes,),
            columns=self.num_classes,
            thresholds=((self, "score_threshold"),),
        )

    def losses(self, images: ImageList, features: list[Tensor], ground_truths: list[Target]) -> dict[str, Tensor]:
        output = self.head(features)
        anchors = torch.cat(self.anchors(features))
        valid = self.anchors.valid(anchors, images.image_sizes)
        assigned = assigned_anchors(
            output,
            anchors,
            matches=self.assign(output, anchors, valid, ground_truths),
            ground_truths=ground_truths,
            coder=self.coder,
            quality=self.quality,
        )
        terms: dict[str, Tensor] = self.criterion(assigned)
        return terms

    def candidate_scores(self, class_scores: Tensor, scores: Tensor, per_level: list[int]) -> tuple[Tensor, Tensor]:
        """Select the anchors (K,) of one image that enter NMS, and their scores (K, C); 0 excludes a class.

        ``class_scores`` (A, C) select and are compared with the threshold; ``scores`` (A, C) rank the detections. As
        published, each level contributes its top-k class scores over all anchors and classes.
        """
        first, selected = 0, torch.zeros_like(scores)
        for count in per_level:
            _, rows, labels = top_scores(
                class_scores[first : first + count], limit=self.candidates, threshold=self.score_threshold
            )
            selected[rows + first, labels] = scores[rows + first, labels]
            first += count
        anchors = torch.where(selected.amax(1) > 0)[0]
        return anchors, selected[anchors]

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        output = self.head(features)
        anchors = torch.cat(self.anchors(features))
        class_scores, scores = self.criterion.scores(output.logits), self.scores(output)
        results = []
        for image, size in enumerate(images.image_sizes):
            rows, candidates = self.candidate_scores(class_scores[image], scores[image], output.per_level)
            boxes = self.coder.decode_single(output.box_deltas[image, rows].float(), anchors[rows])
            boxes = clip_boxes_to_image(boxes, size)
            detections = detect(candidates, boxes, threshold=0.0, iou=self.nms, limit=self.detections)
            results.append(vote(detections, boxes, candidates) if self.vote else detections)
        return results
