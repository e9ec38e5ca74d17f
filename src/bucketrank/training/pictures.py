"""Validation images with what was found and what is true."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from bucketrank.detectors import Detector
from bucketrank.training.atomic import write
from bucketrank.training.data import Data


@torch.no_grad()
def draw_pictures(model: Detector, data: Data, folder: Path, *, threshold: float, most: int) -> list[Path]:
    """Up to ``most`` pictures, of images spread over the validation set; named by the image's id."""
    from bucketrank.drawing import draw

    images = data.val
    count = min(most, len(images))
    chosen = [round(place * (len(images) - 1) / max(count - 1, 1)) for place in range(count)]
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    paths = []
    for index in chosen:
        image, target = images[index]
        (found,) = model([image.to(device)])
        result = {name: value.cpu() for name, value in found.items()}
        picture = draw(image, result, ground_truth=target, classes=data.classes, threshold=threshold)
        path = folder / f"{int(target['image_id'])}.jpg"
        write(path, partial(picture.save, format="JPEG", quality=90))
        paths.append(path)
    model.train(was_training)
    return paths
