"""Weights files of untrained detectors whose scores nevertheless vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from bucketrank.detectors import Detector
from bucketrank.settings import from_dict
from bucketrank.weights.files import Meta, save_weights
from bucketrank.weights.load import build_detector

CLASSES = ["cat", "dog", "owl"]
CATEGORIES = [3, 5, 9]


def randomised(model: Detector) -> Detector:
    """Give larger weights to the layers that are initialised near zero, so that scores vary over the image."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and float(module.weight.detach().std()) < 0.02:
            nn.init.normal_(module.weight, std=0.05)
    return model.eval()


def write_weights(path: Path, *, name: str = "atss", threshold: float = 0.02, **settings: Any) -> tuple[Detector, Path]:
    """Write the weights of a tiny detector to ``path``; return both."""
    detector: dict[str, Any] = {"name": name, "channels": 32, **settings}
    if name.endswith("rcnn"):
        detector |= {"hidden": 32, "test_proposals": 100}
    recipe = from_dict(
        {"detector": detector, "backbone": {"name": "test_resnet"}, "inputs": {"min_size": 96, "max_size": 128}}
    )
    torch.manual_seed(0)
    model = randomised(build_detector(recipe, num_classes=len(CLASSES)))
    meta = Meta(classes=CLASSES, category_ids=CATEGORIES, threshold=threshold, recipe=recipe.to_dict())
    save_weights(path, model, meta)
    return model, path
