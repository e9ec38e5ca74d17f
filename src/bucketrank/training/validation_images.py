"""Validation images with detections and ground truth drawn on them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from bucketrank.detectors import Detector
from bucketrank.training.data_module import DataModule
from bucketrank.weights.atomic import write


@torch.no_grad()
def draw_validation_images(
    model: Detector, data_module: DataModule, folder: Path, *, threshold: float, count: int
) -> list[Path]:
    """Draw up to ``count`` images, spread over the validation set; each file is named by the image's id."""
    from bucketrank.drawing import draw

    images = data_module.val
    count = min(count, len(images))
    indices = [round(number * (len(images) - 1) / max(count - 1, 1)) for number in range(count)]
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    paths = []
    for index in indices:
        image, target = images[index]
        (detections,) = model([image.to(device)])
        result = {name: value.cpu() for name, value in detections.items()}
        picture = draw(image, result, ground_truth=target, classes=data_module.classes, threshold=threshold)
        path = folder / f"{int(target['image_id'])}.jpg"
        write(path, partial(picture.save, format="JPEG", quality=90))
        paths.append(path)
    model.train(was_training)
    return paths
