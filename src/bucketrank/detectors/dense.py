"""What the one-stage detectors share: every anchor of every level is a candidate for every class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import clip_boxes_to_image

from bucketrank.catalogue import BackboneSettings, InputSettings, LossSettings
from bucketrank.catalogue.detector_specs import DenseSettings
from bucketrank.detectors.criterion import Assigned, HeadRecipe, assigned, build_criterion
from bucketrank.detectors.dense_head import DenseHead, DenseOutput
from bucketrank.detectors.detector import Detector
from bucketrank.detectors.postprocess import best_entries, without_duplicates
from bucketrank.detectors.targets import Target
from bucketrank.ops.anchors import Anchors

# What the quality branch should say, of the anchors of P positives, their boxes and their objects.
Quality = Callable[[Tensor, Tensor, Tensor], Tensor]


def compared(
    output: DenseOutput,
    anchors: Tensor,
    *,
    matches: list[Tensor],
    truths: list[Target],
    coder: BoxCoder,
    quality: Quality,
) -> Assigned:
    """What a dense head said of ``anchors`` (A, 4), the same for all images, and what it should have said."""
    found = assigned(
        output.logits.flatten(0, 1),
        output.codes.flatten(0, 1),
        candidates=[anchors] * len(matches),
        matches=matches,
        truths=truths,
        coder=coder,
        quality_logits=None if output.quality is None else output.quality.flatten(),
    )
    if output.quality is None:
        return found
    positive = anchors.repeat(len(matches), 1)[found.positives]
    return replace(found, quality=quality(positive, found.boxes.detach(), found.objects))


class DenseDetector(Detector):
    """A head over anchors, an assignment and a criterion; a detector of this kind says how to assign."""

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
        self.backbone.leave_out_finest()  # the pyramid starts at stride 8
        self.candidates, self.score_threshold = settings.candidates, settings.score_threshold
        self.nms, self.detections, self.vote = settings.nms, settings.detections, vote

    def assign(self, output: DenseOutput, anchors: Tensor, valid: Tensor, truths: list[Target]) -> list[Tensor]:
        """For each image (A,) the object of every anchor, NEGATIVE or IGNORED; ``valid`` is (B, A)."""
        raise NotImplementedError

    def quality(self, anchors: Tensor, boxes: Tensor, objects: Tensor) -> Tensor:
        """What the quality branch should say of P positives."""
        raise NotImplementedError

    def scores(self, output: DenseOutput) -> Tensor:
        """(B, A, C) by which detections are ranked."""
        return self.criterion.scores(output.logits)

    def losses(self, images: ImageList, features: list[Tensor], truths: list[Target]) -> dict[str, Tensor]:
        output = self.head(features)
        anchors = torch.cat(self.anchors(features))
        valid = self.anchors.valid(anchors, images.image_sizes)
        matches = self.assign(output, anchors, valid, truths)
        found = compared(output, anchors, matches=matches, truths=truths, coder=self.coder, quality=self.quality)
        terms: dict[str, Tensor] = self.criterion(found)
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
                    scores[image, first : first + count], most=self.candidates, threshold=self.score_threshold
                )
                values.append(value)
                rows.append(row + first)
                labels.append(label)
                first += count
            row = torch.cat(rows)
            boxes = self.coder.decode_single(output.codes[image, row].float(), anchors[row])
            results.append(
                without_duplicates(
                    clip_boxes_to_image(boxes, size),
                    torch.cat(values),
                    torch.cat(labels),
                    iou=self.nms,
                    most=self.detections,
                    vote=self.vote,
                )
            )
        return results
