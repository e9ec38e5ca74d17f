"""Models of both libraries small enough for a test, and images to overfit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ..integrations import torchvision_models, transformers_models

# Tiny models of torchvision's classes, by the names of the models that they stand for.
TINY_TORCHVISION = {
    "fasterrcnn_resnet50_fpn": "faster_rcnn",
    "maskrcnn_resnet50_fpn": "mask_rcnn",
    "retinanet_resnet50_fpn": "retinanet",
    "fcos_resnet50_fpn": "fcos",
    "ssd300_vgg16": "ssd",
}
COLOURS = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.3, 0.9]])


def use_tiny_torchvision(patch: pytest.MonkeyPatch) -> None:
    """Let torchvision build tiny models of its own classes."""

    def get_model(name: str, *, num_classes: int, **arguments: Any) -> Any:
        patch.setattr(torchvision_models, "CLASSES", num_classes)
        return torchvision_models.MODELS[TINY_TORCHVISION[name]]()

    patch.setattr("torchvision.models.get_model", get_model)


def transformers_folder(name: str, folder: Path) -> Path:
    """Write a tiny model of transformers with random weights, as ``save_pretrained`` does."""
    path = folder / name
    if not path.exists():
        transformers_models.make(name).save_pretrained(path)
    return path


def squares(count: int = 4, *, side: int = 64) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return images of two coloured squares side by side on grey, and targets with boxes, labels and masks."""
    generator = torch.Generator().manual_seed(0)
    images, targets = [], []
    for _ in range(count):
        image = 0.4 + 0.1 * torch.rand(3, side, side, generator=generator)
        boxes: list[list[int]] = []
        labels = torch.randint(1, 3, (2,), generator=generator)
        masks = torch.zeros(2, side, side, dtype=torch.uint8)
        for column, label in enumerate(labels.tolist()):
            extent = int(torch.randint(side // 4, side // 2, (1,), generator=generator))
            x = column * side // 2 + int(torch.randint(0, side // 2 - extent + 1, (1,), generator=generator))
            y = int(torch.randint(0, side - extent, (1,), generator=generator))
            image[:, y : y + extent, x : x + extent] = COLOURS[label - 1][:, None, None]
            masks[column, y : y + extent, x : x + extent] = 1
            boxes.append([x, y, x + extent, y + extent])
        images.append(image)
        targets.append({"boxes": torch.tensor(boxes).float(), "labels": labels, "masks": masks})
    return images, targets
