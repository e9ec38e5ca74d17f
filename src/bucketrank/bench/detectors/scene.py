"""Synthetic images with objects, drawn by seed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Sides of an object, as fractions of the shorter side of the image.
SMALLEST, LARGEST = 1 / 12, 1 / 2


class Scene(NamedTuple):
    """A batch of images and targets, in the form that the detectors take."""

    images: list[Tensor]
    targets: list[dict[str, Tensor]]


def draw_scene(
    image_size: tuple[int, int], *, batch: int, objects: int, classes: int, masks: bool, seed: int, device: str = "cpu"
) -> Scene:
    """Draw images of noise with ``objects`` boxes of all sizes per image, and ellipses as masks.

    The numbers are drawn on the CPU, so that they are the same on every device.

    >>> scene = draw_scene((64, 96), batch=2, objects=3, classes=5, masks=True, seed=0)
    >>> [tuple(image.shape) for image in scene.images], tuple(scene.targets[0]["masks"].shape)
    ([(3, 64, 96), (3, 64, 96)], (3, 64, 96))
    """
    height, width = image_size
    generator = torch.Generator().manual_seed(seed)
    images, targets = [], []
    for _ in range(batch):
        images.append(torch.rand(3, height, width, generator=generator))
        # Uniform on a logarithmic scale, so that small objects are as frequent as large ones.
        side = min(height, width) * SMALLEST * (LARGEST / SMALLEST) ** torch.rand(objects, 2, generator=generator)
        corner = torch.rand(objects, 2, generator=generator) * (torch.tensor([width, height]) - side)
        boxes = torch.cat([corner, corner + side], 1)
        target = {"boxes": boxes, "labels": torch.randint(1, classes + 1, (objects,), generator=generator)}
        if masks:
            target["masks"] = _ellipses(boxes, height, width)
        targets.append({name: value.to(device) for name, value in target.items()})
    return Scene([image.to(device) for image in images], targets)


def _ellipses(boxes: Tensor, height: int, width: int) -> Tensor:
    """Return masks of shape (objects, height, width), 1 inside the ellipse that fills the box."""
    y = torch.arange(height)[None, :, None] + 0.5
    x = torch.arange(width)[None, None, :] + 0.5
    x1, y1, x2, y2 = (edge[:, None, None] for edge in boxes.unbind(1))
    across, down = (2 * x - x1 - x2) / (x2 - x1), (2 * y - y1 - y2) / (y2 - y1)
    return (across**2 + down**2 <= 1).to(torch.uint8)
