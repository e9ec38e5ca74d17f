"""Detections in images, from Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from bucketrank.data.image_files import read_image, rgb8
from bucketrank.devices import resolve_device

ImageInput = str | Path | Image.Image | NDArray[np.uint8] | Tensor


def predict(
    model: nn.Module,
    images: Iterable[ImageInput],
    *,
    threshold: float | None = None,
    batch_size: int = 1,
    device: str = "auto",
) -> list[dict[str, Tensor]]:
    """Return the detections in each image, best first, as tensors on the CPU.

    ``images`` are file names, PIL images, arrays (H, W, 3) of uint8, or tensors (3, H, W) of uint8 or of floats from 0
    to 1. ``threshold`` is the minimum score to report. By default it is the threshold stored with the weights, which
    ``load_model`` sets on the model; a model that was not loaded from a weights file reports all detections. The model
    is moved to ``device`` (auto: cuda if available, else cpu) and stays there.

    Args:
        model: a detector.
        images: the images, in any of the forms above.
        threshold: minimum score to report; by default the stored threshold.
        batch_size: images per batch.
        device: a torch device; auto is cuda if available.

    >>> from bucketrank.detectors import build
    >>> small = {"channels": 32, "min_size": 96, "max_size": 128}
    >>> model = build("atss", num_classes=3, backbone="test_resnet", **small)
    >>> # Without training, every image has 100 detections with low scores.
    >>> (detections,) = predict(model, [torch.zeros(3, 80, 100)])
    >>> {name: tuple(value.shape) for name, value in detections.items()}
    {'boxes': (100, 4), 'scores': (100,), 'labels': (100,)}
    """
    if batch_size < 1:
        raise ValueError(f"predict: expected a batch_size of at least 1, got {batch_size}")
    min_score = float(getattr(model, "stored_threshold", 0.0)) if threshold is None else threshold
    resolved = resolve_device(device)
    was_training = model.training
    model.to(resolved).eval()
    predictions: list[dict[str, Tensor]] = []
    try:
        with torch.inference_mode():
            for batch in _batches(images, batch_size):
                detections = model([as_tensor(image).to(resolved) for image in batch])
                predictions += [_at_least(each, min_score) for each in detections]
    finally:
        model.train(was_training)
    return predictions


def as_tensor(image: ImageInput) -> Tensor:
    """Return the image as the input of a detector: a tensor (3, H, W) of floats from 0 to 1.

    The EXIF orientation of a file is applied, so that photographs are upright.
    """
    if isinstance(image, str | Path):
        image = read_image(Path(image), upright=True)
    if isinstance(image, Image.Image):
        image = rgb8(image)
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise ValueError(f"predict: expected an array (H, W, 3) of uint8, got {image.shape} of {image.dtype}")
        image = torch.from_numpy(np.ascontiguousarray(image).copy()).permute(2, 0, 1)
    if image.is_floating_point():
        return image.float()
    if image.dtype != torch.uint8:
        raise ValueError(
            f"predict: expected a tensor (3, H, W) of uint8 or of floats from 0 to 1, got {image.dtype}; "
            "convert values from 0 to 255 with image.to(torch.uint8)"
        )
    return image.float() / 255


def _batches(images: Iterable[ImageInput], size: int) -> Iterator[list[ImageInput]]:
    remaining = iter(images)
    while batch := list(islice(remaining, size)):
        yield batch


def _at_least(detections: dict[str, Tensor], threshold: float) -> dict[str, Tensor]:
    kept = detections["scores"] >= threshold
    return {name: values[kept].cpu() for name, values in detections.items()}
