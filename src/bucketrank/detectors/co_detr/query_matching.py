"""Hungarian matching of queries to objects, for the encoder's proposals and all decoder layers of a step together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import box_convert

from bucketrank.detectors.co_detr.decoder import Decoded
from bucketrank.detectors.criterion import Assigned
from bucketrank.detectors.targets import Target
from bucketrank.ops.assignment import assign_hungarian_batch
from bucketrank.ops.assignment.assign_hungarian import CostWeights, ImageQueries

L1_COST, GIOU_COST = 5.0, 2.0


@dataclass(frozen=True)
class QueryLayer:
    """The queries of a layer, the objects of each image, and which queries (B, Q) take part; None stands for all."""

    decoded: Decoded
    ground_truths: list[Target]
    valid: Tensor | None = None


@dataclass(frozen=True)
class QueryMatching:
    """The costs of the matching: the weight of the class cost, and its focal ``alpha`` and ``gamma``."""

    class_cost: float
    alpha: float
    gamma: float

    def assign(self, layers: Sequence[QueryLayer], image_sizes: Sequence[tuple[int, int]]) -> list[Assigned]:
        """Match each layer on its own, one query to one object, and return the inputs of the criterion.

        One call matches all layers and images, so the number of host waits does not depend on them.
        """
        scales = image_scales(image_sizes, layers[0].decoded.boxes.device)
        batch = [
            ImageQueries(boxes, objects["boxes"], logits, objects["labels"], size, valid)
            for layer in layers
            for boxes, logits, objects, size, valid in zip(
                in_pixels(layer.decoded.boxes.detach(), scales[:, None]),
                layer.decoded.logits.detach(),
                layer.ground_truths,
                image_sizes,
                [None] * len(image_sizes) if layer.valid is None else layer.valid,
                strict=True,
            )
        ]
        weights = CostWeights(self.class_cost, L1_COST, GIOU_COST, self.alpha, self.gamma)
        matched = iter(assign_hungarian_batch(batch, weights))
        assigned = []
        for layer in layers:
            of_images = [next(matched) for _ in image_sizes]
            queries = layer.decoded.logits.shape[1]
            assigned += Assigned.from_queries(
                [(layer.decoded.logits, layer.decoded.boxes)],
                matches=[each.assignment for each in of_images],
                rows=torch.cat([each.queries + image * queries for image, each in enumerate(of_images)]),
                ground_truths=layer.ground_truths,
                scales=scales,
            )
        return assigned


def image_scales(image_sizes: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return width, height, width and height of each image (B, 4), from sizes of (height, width)."""
    sizes = [(width, height) * 2 for height, width in image_sizes]
    return torch.tensor(sizes, dtype=torch.float32).to(device, non_blocking=True)


def in_pixels(boxes: Tensor, scales: Tensor) -> Tensor:
    """Convert (cx, cy, w, h) in units of the image to (x1, y1, x2, y2) in pixels, with :func:`image_scales`."""
    corners: Tensor = box_convert(boxes.float(), "cxcywh", "xyxy") * scales
    return corners
