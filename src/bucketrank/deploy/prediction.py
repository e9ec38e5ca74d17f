"""Detections of pictures, from Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from bucketrank.data.image_files import read_image

Picture = str | Path | Image.Image | NDArray[np.uint8] | Tensor


def predict(
    model: nn.Module,
    images: Iterable[Picture],
    *,
    threshold: float = 0.0,
    batch: int = 1,
    device: torch.device | str | None = None,
) -> list[dict[str, Tensor]]:
    """The detections of each image with a score from ``threshold`` on, best first, on the CPU.

    ``images`` are files, pictures, arrays (H, W, 3) of bytes, or tensors (3, H, W) of bytes or of floats from 0 to 1.
    ``device`` is where to compute; None leaves the model where it is. The threshold that suits a model is stored with
    its weights.

    >>> from bucketrank.detectors import build
    >>> model = build("atss", num_classes=3, backbone="test_resnet", channels=32, min_size=96, max_size=128)
    >>> (found,) = predict(model, [torch.zeros(3, 80, 100)])  # untrained: 100 detections, none of them worth much
    >>> {name: tuple(value.shape) for name, value in found.items()}
    {'boxes': (100, 4), 'scores': (100,), 'labels': (100,)}
    """
    if batch < 1:
        raise ValueError(f"predict: expected a batch of at least 1 image, got {batch}")
    if device is not None:
        model.to(device)
    where = next(model.parameters()).device
    was_training = model.training
    model.eval()
    found: list[dict[str, Tensor]] = []
    try:
        with torch.inference_mode():
            for group in _groups(images, batch):
                detections = model([as_tensor(image).to(where) for image in group])
                found += [_from(each, threshold) for each in detections]
    finally:
        model.train(was_training)
    return found


def as_tensor(image: Picture) -> Tensor:
    """The image as a detector takes it: (3, H, W), floats from 0 to 1.

    Files are turned as their EXIF orientation says, so that a photograph is seen as it was taken.
    """
    if isinstance(image, str | Path):
        image = read_image(Path(image), upright=True)
    if isinstance(image, Image.Image):
        image = np.asarray(image.convert("RGB"))
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise ValueError(f"predict: expected an array (H, W, 3) of bytes, got {image.shape} of {image.dtype}")
        image = torch.from_numpy(np.ascontiguousarray(image).copy()).permute(2, 0, 1)
    return image if image.is_floating_point() else image.float() / 255


def _groups(images: Iterable[Picture], size: int) -> Iterator[list[Picture]]:
    rest = iter(images)
    while group := list(islice(rest, size)):
        yield group


def _from(detections: dict[str, Tensor], threshold: float) -> dict[str, Tensor]:
    kept = detections["scores"] >= threshold
    return {name: values[kept].cpu() for name, values in detections.items()}
