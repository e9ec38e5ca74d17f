"""The contenders: each detector with RS loss by every method and with two score-based losses, on synthetic images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bucketrank.settings import detector_spec

EXACT, BUCKETED, PAIRWISE = "rs/exact", "rs/bucketed", "rs/pairwise"
FOCAL, USUAL = "focal", "usual"
NAMES = (EXACT, BUCKETED, PAIRWISE, FOCAL, USUAL)
# Their time grows with P x (P + N), so it is estimated before they run.
QUADRATIC = (BUCKETED, PAIRWISE)

RCNNS = ("faster_rcnn", "mask_rcnn", "cascade_rcnn")
# Settings that a ranking loss changes by default, given to ``focal`` so that it has the same candidates.
SAME_CANDIDATES: dict[str, dict[str, Any]] = {
    "faster_rcnn": {},
    "mask_rcnn": {"mask_rois": 200},
    "cascade_rcnn": {},
    "retinanet": {"scales": 2},
    "atss": {"anchors": 3},
    "paa": {"anchors": 3},
    "co_detr": {"sampling": False},
}
# A transformer of the published size would take most of the benchmark's time.
SMALLER: dict[str, dict[str, Any]] = {
    "co_detr": {
        "queries": 100,
        "auxiliary_queries": 100,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "feedforward": 256,
        "hidden": 256,
    }
}
# Titles of ``focal`` and ``usual``.
SCORED_TITLES = {
    "faster_rcnn": ("focal, no sampling", "cross-entropy, 512 sampled"),
    "mask_rcnn": ("focal, no sampling", "cross-entropy, 512 sampled"),
    "cascade_rcnn": ("focal, no sampling", "cross-entropy, 512 sampled"),
    "retinanet": ("focal, 2 scales", "focal, 3 scales"),
    "atss": ("focal, 3 anchors", "focal, 1 anchor"),
    "paa": ("focal, 3 anchors", "focal, 1 anchor"),
    "co_detr": ("focal, no sampling", "focal and cross-entropy, 512 sampled"),
}
TITLES = {name: detector_spec(name).title for name in SCORED_TITLES}


@dataclass(frozen=True)
class DetectorContender:
    """A detector with a loss; ``build`` holds the loss settings for :func:`bucketrank.detectors.build`."""

    detector: str
    name: str
    title: str
    build: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{TITLES[self.detector]}, {self.title}"


def detector_contenders(detector: str) -> list[DetectorContender]:
    """Return the contenders of one detector, in the order of ``NAMES``.

    ``focal`` is a score-based loss on the same candidates: it takes every anchor and proposal, with the anchors and
    the box loss of the ranking loss. ``usual`` is the loss the detector is usually trained with: cross-entropy on 256
    anchors and 512 proposals per image for the R-CNNs, otherwise focal loss on the detector's own anchors.
    """
    methods = {name: name.removeprefix("rs/") for name in (EXACT, BUCKETED, PAIRWISE)}
    focal = {"loss": "focal", "box_loss": "giou", **SAME_CANDIDATES[detector]}
    usual = {"loss": "ce" if detector in RCNNS else "focal"}
    focal_title, usual_title = SCORED_TITLES[detector]
    return [
        *(DetectorContender(detector, name, name, {"loss": "rs", "method": methods[name]}) for name in methods),
        DetectorContender(detector, FOCAL, focal_title, focal),
        DetectorContender(detector, USUAL, usual_title, usual),
    ]


# Sides of an object, as fractions of the shorter side of the image.
MIN_OBJECT, MAX_OBJECT = 1 / 12, 1 / 2


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
        side = (
            min(height, width) * MIN_OBJECT * (MAX_OBJECT / MIN_OBJECT) ** torch.rand(objects, 2, generator=generator)
        )
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
