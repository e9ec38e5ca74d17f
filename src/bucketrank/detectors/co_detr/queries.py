"""Extra queries from the positives of the auxiliary heads: many for one object, and assigned to it in advance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from bucketrank.detectors.co_detr.decoder import BoxEncoding, Queries
from bucketrank.detectors.co_detr.geometry import EDGE
from bucketrank.detectors.initialisation import initialise_linear
from bucketrank.ops.assignment import IGNORED, NEGATIVE

FEWEST = 9  # queries per head and image, so that a batch without objects has some too
PADDING = -1  # row of a query without a candidate


@dataclass(frozen=True)
class Candidates:
    """The candidates that an auxiliary head was trained on, per image."""

    boxes: list[Tensor]  # (A, 4) in pixels
    features: list[Tensor]  # (A, C) the encoder's features
    matches: list[Tensor]  # (A,) the object of each candidate, NEGATIVE or IGNORED


class AuxiliaryQueries(nn.Module):
    """The queries of one auxiliary head, for the same decoder that detects."""

    def __init__(self, width: int, *, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.encoding = BoxEncoding(width)
        self.project = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Parameter(torch.randn(width))  # distinguishes the queries of this head from those of other heads
        initialise_linear(self.project)

    def forward(self, candidates: Candidates, image_sizes: list[tuple[int, int]]) -> tuple[Queries, list[Tensor]]:
        """Return the queries, K for each image, and per image the object (K,) of each."""
        drawn = draw(candidates.matches, limit=self.limit)
        boxes, features, matches = [], [], []
        for number, (rows, (height, width)) in enumerate(zip(drawn, image_sizes, strict=True)):
            own, missing = rows[rows != PADDING], int((rows == PADDING).sum())
            scale = candidates.boxes[number].new_tensor([width, height, width, height])
            relative_boxes = box_convert(candidates.boxes[number][own].detach() / scale, "xyxy", "cxcywh").float()
            boxes.append(torch.cat([relative_boxes, relative_boxes.new_tensor([0.5, 0.5, 1, 1]).expand(missing, 4)]))
            feature = candidates.features[number][own]
            features.append(torch.cat([feature, feature.new_zeros(missing, feature.shape[1])]))
            match = candidates.matches[number][own]
            matches.append(torch.cat([match, match.new_full((missing,), IGNORED)]))
        # An anchor may extend beyond its image.
        initial = torch.stack(boxes).clamp(EDGE, 1 - EDGE)
        positions, content = self.encoding(initial)
        content = content + self.norm(self.project(torch.stack(features)))
        return Queries(content, positions + self.head, initial), matches


def draw(matches: list[Tensor], *, limit: int) -> list[Tensor]:
    """Return, per image, the rows (K,) of the candidates that become queries: positives, then negatives.

    K is the same for all images: the largest number of positives of an image, but at least ``FEWEST`` and at most
    ``limit``. If an image has more positives than K, a random subset is drawn; if it has fewer, random negatives fill
    up. If there are not enough candidates, the remaining rows are ``PADDING``.
    """
    positives = [torch.where(match >= 0)[0] for match in matches]
    negatives = [torch.where(match == NEGATIVE)[0] for match in matches]
    count = min(max([FEWEST, *map(len, positives)]), limit)
    drawn = []
    for positive, negative in zip(positives, negatives, strict=True):
        rows = _random_subset(positive, count)
        rows = torch.cat([rows, _random_subset(negative, count - len(rows))])
        drawn.append(torch.cat([rows, rows.new_full((count - len(rows),), PADDING)]))
    return drawn


def _random_subset(rows: Tensor, count: int) -> Tensor:
    return rows[torch.randperm(len(rows), device=rows.device)[:count]] if len(rows) > count else rows
