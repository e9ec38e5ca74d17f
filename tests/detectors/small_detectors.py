"""Detectors small enough for a test, and random images with targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bucketrank.detectors import build

CLASSES = 3
SIZES = ((96, 120), (80, 128))  # height and width of the images of a scene


def small_detector(name: str, *, loss: str = "rs", seed: int = 0, **settings: Any) -> Any:
    """Build the detector ``name`` with a backbone of a few layers, for images of about a hundred pixels."""
    torch.manual_seed(seed)
    defaults: dict[str, Any] = {"backbone": "test_resnet", "channels": 32, "min_size": 96, "max_size": 160}
    if name.endswith("rcnn"):
        defaults |= {"hidden": 32, "proposals": 100, "test_proposals": 100}
    if name.startswith("co_"):
        defaults |= {"hidden": 32, "proposals": 60, "queries": 40, "auxiliary_queries": 30}
        defaults |= {
            "encoder_layers": 1,
            "decoder_layers": 2,
            "heads": 4,
            "points": 2,
            "feedforward": 64,
            "detections": 100,
        }
    return build(name, num_classes=CLASSES, loss=loss, **(defaults | settings))


def scene(objects: tuple[int, ...] = (3, 2), *, seed: int = 0) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return one image of noise per number of objects, and targets with boxes, labels and masks."""
    generator = torch.Generator().manual_seed(seed)
    images, targets = [], []
    for number, count in enumerate(objects):
        height, width = SIZES[number % len(SIZES)]
        corner = torch.rand(count, 2, generator=generator) * torch.tensor([width * 0.5, height * 0.5])
        extent = torch.rand(count, 2, generator=generator) * torch.tensor([width * 0.4, height * 0.4]) + 8
        boxes = torch.cat([corner, corner + extent], 1)
        masks = torch.zeros(count, height, width, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        images.append(torch.rand(3, height, width, generator=generator))
        labels = torch.randint(1, CLASSES + 1, (count,), generator=generator)
        targets.append({"boxes": boxes, "labels": labels, "masks": masks})
    return images, targets
