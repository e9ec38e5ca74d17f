"""The first stage: every token proposes a box, and the best boxes initialise the queries (DINO's mixed selection)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bucketrank.detectors.co_detr.branches import box_branch, class_branch
from bucketrank.detectors.co_detr.geometry import Geometry, inverse_sigmoid
from bucketrank.detectors.initialisation import initialise_linear

FINEST_SIDE = 0.05  # the initial side of a proposal on the finest map, in units of the image; it doubles per level
MARGIN = 0.01  # minimum distance of a proposal's coordinates from 0 and 1


@dataclass(frozen=True)
class Proposals:
    """The proposals of all tokens."""

    logits: Tensor  # (B, S, 1) of an object of any class
    boxes: Tensor  # (B, S, 4) as (cx, cy, w, h) in units of the image
    valid: Tensor  # (B, S) whether the token may propose

    def best(self, count: int) -> Tensor:
        """Return the boxes (B, K, 4) of the ``count`` highest scores, or of all tokens if there are fewer; detached."""
        scores = self.logits.detach().float().squeeze(-1).masked_fill(~self.valid, -torch.inf)
        rows = scores.topk(min(count, scores.shape[1]), 1).indices
        return self.boxes.detach().gather(1, rows[..., None].expand(-1, -1, 4))


class Proposer(nn.Module):
    """Predict a score and a box for every token; the box is predicted relative to an initial box around its cell."""

    def __init__(self, width: int, *, score: float) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.classes = class_branch(width, 1, score=score)
        self.boxes = box_branch(width)
        initialise_linear(self.project)

    def forward(self, memory: Tensor, geometry: Geometry) -> Proposals:
        initial, valid = initial_boxes(geometry)
        hidden = self.norm(self.project(memory.where(valid[..., None], 0)))
        boxes = (self.boxes(hidden).float() + inverse_sigmoid(initial)).sigmoid()
        return Proposals(self.classes(hidden), boxes, valid)


def initial_boxes(geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return the initial box (B, S, 4) of each token, and whether the token may propose (B, S).

    A token may not propose if it lies on padding, or if a coordinate of its box is within MARGIN of 0 or 1: there the
    sigmoid is so flat that a box can hardly be refined.
    """
    side = FINEST_SIDE * 2.0**geometry.levels
    sides = side[None, :, None].expand_as(geometry.centres)
    boxes = torch.cat([geometry.centres, sides], -1)
    inside = ((boxes > MARGIN) & (boxes < 1 - MARGIN)).all(-1)
    return boxes.clamp(MARGIN, 1 - MARGIN), inside & geometry.valid
