"""Mask R-CNN (He et al., ICCV 2017) and its mask loss.

The defaults of the mask loss are those published for the loss that trains the detector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import project_masks_on_boxes
from torchvision.ops import clip_boxes_to_image, roi_align

from bucketrank.detectors.base import Target, check_images, check_targets
from bucketrank.detectors.criterion import Criterion, LossTerms
from bucketrank.detectors.layers import initialise_classifier
from bucketrank.detectors.rcnn import STRIDES, BoxHeadStep, FasterRCNN, RoIPool
from bucketrank.losses import self_balance
from bucketrank.settings.detector_specs import MaskRCNNSettings


def dice_errors(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the Dice loss (P,) of masks (P, H, W)."""
    masks, targets = logits.float().sigmoid().flatten(1), targets.float().flatten(1)
    return 1 - 2 * (masks * targets).sum(1) / ((masks**2).sum(1) + (targets**2).sum(1) + 1e-5)


def bce_errors(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the binary cross-entropy (P,) of masks (P, H, W), averaged over the pixels of each mask."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets.float(), reduction="none").flatten(1).mean(1)


def cropped_masks(masks: Tensor, boxes: Tensor, matches: Tensor, size: int) -> Tensor:
    """Crop object masks (G, H, W) to boxes (P, 4) and binarise them: target masks (P, size, size).

    As published, the box is clipped to the image, the crop is aligned to half pixels, and a cell belongs to the object
    if at least half of it is covered. ``matches`` (P,) are the object indices of the boxes.
    """
    rows = torch.cat([matches.to(boxes)[:, None], clip_boxes_to_image(boxes, masks.shape[-2:])], 1)
    crops: Tensor = roi_align(masks[:, None].to(boxes), rows, (size, size), 1.0, sampling_ratio=0, aligned=True)
    return (crops[:, 0] >= 0.5).to(boxes)


ERRORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"dice": dice_errors, "bce": bce_errors}


@dataclass(frozen=True)
class MaskLoss:
    """The weighted mean of the mask errors, times a weight or scaled to the classification loss."""

    name: str  # dice or bce
    balance: bool  # whether to scale the loss to the box head's classification loss
    confidence: bool  # whether to weight positives by their highest class score; otherwise uniformly
    weight: float  # loss weight unless balanced

    @classmethod
    def from_settings(cls, settings: MaskRCNNSettings, criterion: Criterion) -> MaskLoss:
        """Build the loss from the settings; None means the criterion's published choice."""
        published = "dice" if criterion.ranking else "bce"
        balanced = criterion.self_balanced and settings.mask_weight is None
        return cls(
            name=settings.mask_loss or published,
            balance=balanced if settings.mask_balance is None else settings.mask_balance,
            confidence=criterion.ranking if settings.mask_confidence is None else settings.mask_confidence,
            weight=1.0 if settings.mask_weight is None else settings.mask_weight,
        )

    def __call__(
        self, logits: Tensor, targets: Tensor, *, class_logits: Tensor, terms: LossTerms, criterion: Criterion
    ) -> Tensor:
        """Compute the mask loss of P positives; ``logits`` and ``targets`` are (P, H, W).

        ``class_logits`` (P, C) are the positives' logits of the box head, ``terms`` are its loss terms and
        ``criterion`` is its criterion.
        """
        errors = ERRORS[self.name](logits, targets)
        weights = criterion.highest_scores(class_logits) if self.confidence else torch.ones_like(errors)
        mean = criterion.mean(errors, weights)
        if self.balance:
            return self_balance(mean, to=criterion.classification_loss(terms))
        return self.weight * mean


class MaskRCNN(FasterRCNN):
    """Faster R-CNN with a mask head.

    As published, ranking losses train masks with confidence-weighted Dice loss on up to 200 positives per batch.
    Score-based losses train them with cross-entropy on all positives. The settings ``mask_*`` change these defaults.
    """

    masks = True
    low_quality = True  # as in the published configuration

    def __init__(self, num_classes: int, *, settings: MaskRCNNSettings, **shared: Any) -> None:
        super().__init__(num_classes, settings=settings, **shared)
        criterion = self.box_head.criterion
        published = 200 if criterion.ranking else None
        self.mask_rois = published if settings.mask_rois is None else settings.mask_rois
        self.mask_loss: Callable[..., Tensor] = MaskLoss.from_settings(settings, criterion)
        channels = settings.channels
        self.mask_pool = RoIPool(STRIDES, size=14, roi_align=self.roi_align)
        self.transform.published_masks = self.roi_align == "published"
        predictor = MaskRCNNPredictor(channels, channels, num_classes)
        # torchvision's initial weights grow with fewer classes. With a single class the first masks are saturated, and
        # Dice loss has hardly any gradient.
        initialise_classifier(predictor.mask_fcn_logits, 0.5)
        self.mask_head = nn.Sequential(MaskRCNNHeads(channels, (channels,) * 4, dilation=1), predictor)

    def extra_losses(
        self, features: list[Tensor], step: BoxHeadStep, ground_truths: list[Target], image_sizes: list[tuple[int, int]]
    ) -> dict[str, Tensor]:
        rows = step.assigned.rows
        if self.mask_rois is not None and len(rows) > self.mask_rois:
            # Sort, because pooling goes image by image, and the rows of logits, masks and class logits must match.
            rows = rows[torch.randperm(len(rows), device=rows.device)[: self.mask_rois]].sort().values
        image_index, labels = step.assigned.image_index[rows], step.assigned.labels[rows]
        boxes, matches = torch.cat(step.proposals)[rows], torch.cat(step.matches)[rows]
        images = torch.arange(len(ground_truths), device=rows.device)
        counts = (image_index[:, None] == images).sum(0).tolist()  # rows are sorted by image
        rois = list(boxes.split(counts))
        logits = self.mask_logits(features, rois, image_sizes)
        crop = cropped_masks if self.roi_align == "published" else project_masks_on_boxes
        target_masks = [
            crop(ground_truth["masks"], own.float(), match, logits.shape[-1])
            for ground_truth, own, match in zip(ground_truths, rois, matches.split(counts), strict=True)
        ]
        loss = self.mask_loss(
            logits[torch.arange(len(rows), device=rows.device), labels],
            torch.cat(target_masks),
            class_logits=step.assigned.logits[rows],
            terms=step.terms,
            criterion=self.box_head.criterion,
        )
        return {"mask": loss}

    def mask_logits(self, features: list[Tensor], rois: list[Tensor], image_sizes: list[tuple[int, int]]) -> Tensor:
        """Predict mask logits (R, C, 28, 28) for the boxes of all images."""
        logits: Tensor = self.mask_head(self.mask_pool(features, rois, image_sizes))
        return logits

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        return self.with_masks(super().detect(images, features), features, images.image_sizes)

    def detect_in_boxes(self, images: Sequence[Tensor], targets: Sequence[Target]) -> list[dict[str, Tensor]]:
        """Predict masks in the target boxes; return them as detections with score 1 and the target labels.

        Their AP measures only the masks, without box and score errors.
        """
        check_images(images)
        check_targets(images, targets, self.num_classes, masks=False)
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        given = [{"boxes": target["boxes"], "labels": target["labels"] - 1} for target in targets]
        batch, resized = self.transform(list(images), given)
        features = self.neck(self.backbone(batch.tensors))
        scored = [each | {"scores": torch.ones_like(each["boxes"][:, 0])} for each in resized]
        masked = self.with_masks(scored, features, batch.image_sizes)
        results = [result | {"labels": result["labels"] + 1} for result in masked]
        detections: list[dict[str, Tensor]] = self.transform.postprocess(results, batch.image_sizes, sizes)
        return detections

    def with_masks(
        self, results: list[dict[str, Tensor]], features: list[Tensor], image_sizes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """Add masks to detections; labels count from 0."""
        logits = self.mask_logits(features, [result["boxes"] for result in results], image_sizes)
        labels = torch.cat([result["labels"] for result in results])
        class_masks = logits[torch.arange(labels.shape[0], device=labels.device), labels].float().sigmoid()[:, None]
        masks = class_masks.split([result["boxes"].shape[0] for result in results])
        return [result | {"masks": mask} for result, mask in zip(results, masks, strict=True)]
