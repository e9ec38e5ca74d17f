"""The detection transformers of transformers as detectors of this package."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_convert, clip_boxes_to_image

from bucketrank.calibration.score_head import ScoreHead
from bucketrank.catalogue import LibraryInputSettings, LossSettings
from bucketrank.catalogue.library_specs import TransformersSettings
from bucketrank.detectors.postprocess import best_entries
from bucketrank.detectors.targets import Target
from bucketrank.integrations.transformers import use_ranking_loss
from bucketrank.integrations.transformers.transformers_scores import score_head
from bucketrank.pretrained.image_preparation import input_transform
from bucketrank.pretrained.library_detector import LibraryDetector, ranking_arguments
from bucketrank.pretrained.transformers_model import build_model, load_pretrained, parse_config, stored_config


class TransformersDetector(LibraryDetector):
    """A detection transformer for ``num_classes`` classes, with its own loss or a ranking loss.

    Its one loss term is the weighted sum of all terms of all layers. Boxes are relative to the resized image, without
    the padding of a batch.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        settings: TransformersSettings,
        loss: LossSettings,
        inputs: LibraryInputSettings,
    ) -> None:
        super().__init__(num_classes)
        ranking = ranking_arguments(loss)
        if ranking is None:
            settings.require("class_cost", "null with the model's own loss", holds=settings.class_cost is None)
        self.detections, self.score_threshold = settings.detections, settings.score_threshold
        model, processor = _build(num_classes, settings)
        self.model = model
        self.config_text = json.dumps(stored_config(model.config), sort_keys=True)
        self.processor_text = json.dumps(processor, sort_keys=True)
        self.transform = input_transform(model.config, processor, inputs)
        part = "backbone" if hasattr(model.model, "backbone") else "conv_encoder"  # the latter in DEIMv2
        self.backbone_prefix = f"model.model.{part}."
        for name, parameter in model.named_parameters():
            if name.endswith("mask_token"):  # of masked pretraining; without a gradient it would stop DDP
                parameter.requires_grad_(requires_grad=False)
        if settings.freeze_backbone:
            getattr(model.model, part).requires_grad_(requires_grad=False)
        if ranking is not None:
            use_ranking_loss(model, **ranking, class_cost=settings.class_cost)
        self.train()

    def complete_settings(self, settings: Any) -> Any:
        return replace(settings, config=self.config_text, processor=self.processor_text)

    def score_head(self) -> ScoreHead:
        return replace(score_head(self.model), first_label=1, thresholds=((self, "score_threshold"),))

    def model_losses(self, images: list[Tensor], targets: list[Target]) -> dict[str, Tensor]:
        batch, resized = self.transform(images, targets)
        labels = []
        for target, (height, width) in zip(resized, batch.image_sizes, strict=True):
            sides = target["boxes"].new_tensor([width, height, width, height])
            boxes = box_convert(target["boxes"] / sides, "xyxy", "cxcywh")
            labels.append({"class_labels": target["labels"] - 1, "boxes": boxes})
        output = self.model(pixel_values=batch.tensors, pixel_mask=_pixel_mask(batch), labels=labels)
        return {"loss": output.loss}

    def model_detections(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        batch, _ = self.transform(images)
        output = self.model(pixel_values=batch.tensors, pixel_mask=_pixel_mask(batch))
        results = []
        for logits, boxes, (height, width) in zip(output.logits, output.pred_boxes, sizes, strict=True):
            scores, rows, labels = best_entries(
                logits.float().sigmoid(), limit=self.detections, threshold=self.score_threshold
            )
            sides = boxes.new_tensor([width, height, width, height]).float()
            corners = box_convert(boxes[rows].float(), "cxcywh", "xyxy") * sides
            clipped = clip_boxes_to_image(corners, (height, width))
            results.append({"boxes": clipped, "labels": labels + 1, "scores": scores})
        return results


def _build(num_classes: int, settings: TransformersSettings) -> tuple[Any, dict[str, Any]]:
    if settings.weights is not None or settings.config is None:
        return load_pretrained(settings.model, num_classes=num_classes, weights=settings.weights is not None)
    model = build_model(parse_config("config", settings.config), num_classes=num_classes)
    return model, {} if settings.processor is None else parse_config("processor", settings.processor)


def _pixel_mask(batch: Any) -> Tensor:
    """Return a mask (B, H, W) that is 1 on the images and 0 on their padding."""
    height, width = batch.tensors.shape[-2:]
    device = batch.tensors.device
    sizes = torch.tensor(batch.image_sizes, device=device)
    rows = torch.arange(height, device=device) < sizes[:, :1]
    columns = torch.arange(width, device=device) < sizes[:, 1:]
    return (rows[:, :, None] & columns[:, None]).long()
