"""Extra queries from the positives of the auxiliary heads: many for one object, their objects known beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from bucketrank.detectors.co_detr.decoder import BoxEncoding, Queries
from bucketrank.detectors.co_detr.geometry import EDGE
from bucketrank.detectors.co_detr.transformer import start_linear
from bucketrank.ops.assignment import IGNORED, NEGATIVE

FEWEST = 9  # of one head for an image, so that there are some where there is no object
NOBODY = -1


@dataclass(frozen=True)
class Candidates:
    """What an auxiliary head was trained on, for each image."""

    boxes: list[Tensor]  # (A, 4) in pixels
    features: list[Tensor]  # (A, C) what the encoder says of each
    matches: list[Tensor]  # (A,) the object of each, NEGATIVE or IGNORED


class AuxiliaryQueries(nn.Module):
    """The queries of one auxiliary head; the decoder that answers them is the one that detects."""

    def __init__(self, width: int, *, most: int) -> None:
        super().__init__()
        self.most = most
        self.encoding = BoxEncoding(width)
        self.project = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Parameter(torch.randn(width))  # tells the queries of this head from those of others
        start_linear(self.project)

    def forward(self, found: Candidates, image_sizes: list[tuple[int, int]]) -> tuple[Queries, list[Tensor]]:
        """The queries, K for each image, and their objects (K,)."""
        chosen = draw(found.matches, most=self.most)
        boxes, features, matches = [], [], []
        for number, (rows, (height, width)) in enumerate(zip(chosen, image_sizes, strict=True)):
            here, missing = rows[rows != NOBODY], int((rows == NOBODY).sum())
            scale = found.boxes[number].new_tensor([width, height, width, height])
            units = box_convert(found.boxes[number][here].detach() / scale, "xyxy", "cxcywh").float()
            boxes.append(torch.cat([units, units.new_tensor([0.5, 0.5, 1, 1]).expand(missing, 4)]))
            own = found.features[number][here]
            features.append(torch.cat([own, own.new_zeros(missing, own.shape[1])]))
            match = found.matches[number][here]
            matches.append(torch.cat([match, match.new_full((missing,), IGNORED)]))
        # An anchor may reach out of its image.
        started = torch.stack(boxes).clamp(EDGE, 1 - EDGE)
        positions, content = self.encoding(started)
        content = content + self.norm(self.project(torch.stack(features)))
        return Queries(content, positions + self.head, started), matches


def draw(matches: list[Tensor], *, fewest: int = FEWEST, most: int) -> list[Tensor]:
    """For each image the rows (K,) of its candidates that become queries: positives, then negatives; K is one number.

    K is the most positives that an image has, within ``fewest`` and ``most``. Of more positives than K a random set is
    taken; of negatives, what is lacking. Where candidates do not suffice, the rest is ``NOBODY``.
    """
    positives = [torch.where(match >= 0)[0] for match in matches]
    negatives = [torch.where(match == NEGATIVE)[0] for match in matches]
    count = min(max([fewest, *map(len, positives)]), most)
    chosen = []
    for positive, negative in zip(positives, negatives, strict=True):
        taken = _some(positive, count)
        taken = torch.cat([taken, _some(negative, count - len(taken))])
        chosen.append(torch.cat([taken, taken.new_full((count - len(taken),), NOBODY)]))
    return chosen


def _some(rows: Tensor, count: int) -> Tensor:
    return rows[torch.randperm(len(rows), device=rows.device)[:count]] if len(rows) > count else rows
