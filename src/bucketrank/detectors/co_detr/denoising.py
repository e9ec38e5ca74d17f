"""Contrastive denoising (Zhang et al., DINO, ICLR 2023): noisy copies of the objects as additional queries.

The decoder learns to recover an object from a slightly moved copy, and to reject a copy that was moved further. No
matching is needed, because the object of a copy is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from bucketrank.detectors.assignment import NEGATIVE
from bucketrank.detectors.base import Target
from bucketrank.detectors.co_detr.decoder import Queries
from bucketrank.detectors.co_detr.transformer import DINO_EDGE, inverse_sigmoid


@dataclass(frozen=True)
class Denoising:
    """D denoising queries for each image, all groups one after the other."""

    content: Tensor  # (B, D, C)
    boxes: Tensor  # (B, D, 4) relative (cx, cy, w, h)
    matches: list[Tensor]  # (D,) object index of a positive copy, NEGATIVE for other copies and padding
    groups: int

    def before(self, queries: Queries) -> Queries:
        """Put the denoising queries before the others, which do not see them; groups do not see each other."""
        return Queries(
            torch.cat([self.content.to(queries.content.dtype), queries.content], 1),
            None,
            torch.cat([self.boxes, queries.boxes], 1),
            hides=attention_mask(self.boxes.shape[1], queries.boxes.shape[1], groups=self.groups).to(self.boxes.device),
        )


class DenoisingQueries(nn.Module):
    """Queries from the objects of a batch: labels and boxes with noise.

    A group has a positive and a negative copy of each object: first all positive, then all negative ones, both padded
    to the largest number of objects in an image. The number of groups is ``limit`` divided by that number, at least 1.

    A label is replaced by a random class with probability ``label_noise``. Each coordinate of the corners moves by
    ``u * box_noise / 2`` of the box's side in a random direction, with u from 0 to 1 for a positive copy and from 1 to
    2 for a negative one.
    """

    def __init__(self, width: int, num_classes: int, *, limit: int, label_noise: float, box_noise: float) -> None:
        super().__init__()
        self.limit, self.label_noise, self.box_noise = limit, label_noise, box_noise
        self.labels = nn.Embedding(num_classes, width)

    def forward(self, ground_truths: Sequence[Target], scales: Tensor) -> Denoising:
        """Build the queries; ``scales`` (B, 4) holds width, height, width and height of the images."""
        counts = [len(each["labels"]) for each in ground_truths]
        max_objects = max(counts)
        groups = max(self.limit // max(max_objects, 1), 1)
        copies = 2 * groups  # each image has the rows (groups, positive or negative, objects)
        content, boxes, matches = [], [], []
        for objects, count, scale in zip(ground_truths, counts, scales, strict=True):
            labels = self.noisy_labels(objects["labels"].expand(copies, count))
            padded = self.labels.weight.new_zeros(copies, max_objects, self.labels.embedding_dim)
            padded[:, :count] = self.labels(labels)
            content.append(padded.flatten(0, 1))
            noisy = padded.new_full((copies, max_objects, 4), 0.5, dtype=torch.float32)
            noisy[:, :count] = self.noisy_boxes((objects["boxes"].float() / scale).expand(copies, count, 4))
            boxes.append(noisy.flatten(0, 1))
            match = labels.new_full((copies, max_objects), NEGATIVE)
            match[::2, :count] = torch.arange(count, device=match.device)
            matches.append(match.flatten())
        return Denoising(torch.stack(content), torch.stack(boxes), matches, groups)

    def noisy_labels(self, labels: Tensor) -> Tensor:
        """Replace some of the labels, which count from 0, by random classes."""
        replaced = torch.rand(labels.shape, device=labels.device) < self.label_noise
        return torch.where(replaced, torch.randint_like(labels, self.labels.num_embeddings), labels)

    def noisy_boxes(self, boxes: Tensor) -> Tensor:
        """Move the corners of relative boxes (copies, G, 4); every second copy is negative. Return (cx, cy, w, h)."""
        sides = (boxes[..., 2:] - boxes[..., :2]).repeat(1, 1, 2)
        distance = torch.rand_like(boxes)
        distance[1::2] += 1
        direction = torch.randint_like(boxes, 2) * 2 - 1
        moved = (boxes + direction * distance * sides * (self.box_noise / 2)).clamp(0, 1)
        # The corners of a negative copy may have changed places: its side is then as small as allowed.
        return inverse_sigmoid(box_convert(moved, "xyxy", "cxcywh"), edge=DINO_EDGE).sigmoid()


def attention_mask(denoising: int, queries: int, *, groups: int) -> Tensor:
    """Build the mask (K, K) that hides denoising queries, K = ``denoising + queries``; true: row does not see column.

    A denoising query sees its group and all ``queries``. The others see each other only.

    >>> attention_mask(2, 1, groups=2).int()
    tensor([[0, 1, 0],
            [1, 0, 0],
            [1, 1, 0]], dtype=torch.int32)
    """
    group = torch.arange(denoising) // max(denoising // groups, 1)
    hides = torch.zeros(denoising + queries, denoising + queries, dtype=torch.bool)
    hides[:denoising, :denoising] = group[:, None] != group
    hides[denoising:, :denoising] = True
    return hides
