"""Mask R-CNN (He et al., ICCV 2017)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import project_masks_on_boxes

from bucketrank.catalogue.detector_specs import MaskRCNNSettings
from bucketrank.detectors.box_head import STRIDES, RoIPool, Trained
from bucketrank.detectors.criterion import confidences
from bucketrank.detectors.faster_rcnn import FasterRCNN
from bucketrank.detectors.targets import Target


class MaskRCNN(FasterRCNN):
    """Faster R-CNN with a mask for each detection.

    Ranking losses: Dice, weighted by confidence, on at most ``mask_rois`` (200) positives of the batch; score-based
    ones: cross-entropy on all.
    """

    masks = True
    low_quality = 0.5

    def __init__(self, num_classes: int, *, settings: MaskRCNNSettings, **shared: Any) -> None:
        super().__init__(num_classes, settings=settings, **shared)
        usual = 200 if self.box_head.criterion.ranking else None
        self.mask_rois = usual if settings.mask_rois is None else settings.mask_rois
        channels = settings.channels
        self.mask_pool = RoIPool(STRIDES, size=14)
        self.mask_head = nn.Sequential(
            MaskRCNNHeads(channels, (channels,) * 4, dilation=1), MaskRCNNPredictor(channels, channels, num_classes)
        )

    def more_losses(
        self, features: list[Tensor], trained: Trained, truths: list[Target], image_sizes: list[tuple[int, int]]
    ) -> dict[str, Tensor]:
        rows = torch.where(trained.found.positives)[0]
        if self.mask_rois is not None and len(rows) > self.mask_rois:
            # In order again after the draw: pooling goes image by image, and each mask must meet its own weight.
            rows = rows[torch.randperm(len(rows), device=rows.device)[: self.mask_rois]].sort().values
        owners, labels = trained.found.images[rows], trained.found.labels[rows]
        boxes, matches = torch.cat(trained.proposals)[rows], torch.cat(trained.matches)[rows]
        rois = [boxes[owners == image] for image in range(len(truths))]
        logits = self.mask_logits(features, rois, image_sizes)
        wanted = [
            project_masks_on_boxes(truth["masks"], own.float(), matches[owners == image], logits.shape[-1])
            for image, (truth, own) in enumerate(zip(truths, rois, strict=True))
        ]
        criterion = self.box_head.criterion
        loss = criterion.masks(
            logits[torch.arange(len(rows), device=rows.device), labels],
            torch.cat(wanted),
            confidences=confidences(trained.found.logits[rows]),
            balance=torch.stack([term.detach() for name, term in trained.terms.items() if name != "box"]).sum(),
        )
        return {"mask": loss}

    def mask_logits(self, features: list[Tensor], rois: list[Tensor], image_sizes: list[tuple[int, int]]) -> Tensor:
        """(R, C, 28, 28) of the boxes of all images."""
        logits: Tensor = self.mask_head(self.mask_pool(features, rois, image_sizes))
        return logits

    def detect(self, images: ImageList, features: list[Tensor]) -> list[dict[str, Tensor]]:
        results = super().detect(images, features)
        logits = self.mask_logits(features, [result["boxes"] for result in results], images.image_sizes)
        labels = torch.cat([result["labels"] for result in results])
        found = logits[torch.arange(labels.shape[0], device=labels.device), labels].float().sigmoid()[:, None]
        masks = found.split([result["boxes"].shape[0] for result in results])
        return [result | {"masks": mask} for result, mask in zip(results, masks, strict=True)]
