"""The base of the one-stage detectors: every anchor of every level is a candidate for every class."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import clip_boxes_to_image

from bucketrank.calibration.score_head import ScoreHead
from bucketrank.catalogue import BackboneSettings, InputSettings, LossSettings
from bucketrank.catalogue.detector_specs import DenseSettings
from bucketrank.detectors.criterion import Assigned, HeadRecipe, build_criterion
from bucketrank.detectors.criterion.assigned import Quality
from bucketrank.detectors.dense_head import DenseHead, DenseOutput
from bucketrank.detectors.detector import Detector
from bucketrank.detectors.postprocess import best_entries, without_duplicates
from bucketrank.detectors.targets import Target
from bucketrank.ops.anchors import Anchors


def assigned_anchors(
    output: DenseOutput,
    anchors: Tensor,
    *,
    matches: list[Tensor],
    ground_truths: list[Target],
    coder: BoxCoder,
    quality: Quality,
) -> Assigned:
    """Build the input of the criterion from a dense head's output for ``anchors`` (A, 4), the same for all images."""
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
    """A head over anchors and a criterion; a subclass adds the assignment."""

    recipe: HeadRecipe
    anchors: Anchors
    head: DenseHead
    coder: BoxCoder

    def __init__(
        self,
        num_classes: int,
        *,
        backbone: BackboneSettings,
        loss: LossSettings,
        inputs: InputSettings,
        settings: DenseSettings,
        vote: bool,
    ) -> None:
        super().__init__(num_classes, backbone=backbone, inputs=inputs)
        self.criterion = build_criterion(loss, self.recipe)
        self.backbone.freeze_only_finest()  # the pyramid starts at stride 8
        self.candidates, self.score_threshold = settings.candidates, settings.score_threshold
        self.nms, self.detections, self.vote = settings.nms, settings.detections, vote

    def assign(self, output: DenseOutput, anchors: Tensor, valid: Tensor, ground_truths: list[Target]) -> list[Tensor]:
        """Return, per image, the object (A,) of every anchor, NEGATIVE or IGNORED; ``valid`` is (B, A)."""
        raise NotImplementedError

    def quality(self, anchors: Tensor, boxes: Tensor, objects: Tensor) -> Tensor:
        """Return the targets (P,) of the quality branch for P positives."""
        raise NotImplementedError

    def scores(self, output: DenseOutput) -> Tensor:
        """Return the scores (B, A, C) that rank detections."""
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

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        output = self.head(features)
        anchors = torch.cat(self.anchors(features))
        scores = self.scores(output)
        results = []
        for image, size in enumerate(images.image_sizes):
            first, values, rows, labels = 0, [], [], []
            for count in output.per_level:
                value, row, label = best_entries(
                    scores[image, first : first + count], limit=self.candidates, threshold=self.score_threshold
                )
                values.append(value)
                rows.append(row + first)
                labels.append(label)
                first += count
            row = torch.cat(rows)
            boxes = self.coder.decode_single(output.box_deltas[image, row].float(), anchors[row])
            results.append(
                without_duplicates(
                    clip_boxes_to_image(boxes, size),
                    torch.cat(values),
                    torch.cat(labels),
                    iou=self.nms,
                    limit=self.detections,
                    vote=self.vote,
                )
            )
        return results
