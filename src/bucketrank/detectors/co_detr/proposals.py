"""The first of the two stages: every token proposes a box, and the best start the queries (mixed selection)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bucketrank.detectors.co_detr.branches import box_branch, class_branch
from bucketrank.detectors.co_detr.geometry import Geometry, inverse_sigmoid
from bucketrank.detectors.co_detr.transformer import start_linear

SMALLEST = 0.05  # the side of a proposal on the finest map, in units of the image; doubled on every next
MARGIN = 0.01  # by which a proposal's numbers must be inside of 0 and 1


@dataclass(frozen=True)
class Proposals:
    """Of every token."""

    logits: Tensor  # (B, S, 1): whether there is an object, of whatever class
    boxes: Tensor  # (B, S, 4) centre and size, in units of the image
    valid: Tensor  # (B, S) whether the token may propose

    def best(self, count: int) -> Tensor:
        """(B, K, 4) the boxes of the ``count`` highest scores, without gradient; fewer if there are fewer tokens."""
        scores = self.logits.detach().float().squeeze(-1).masked_fill(~self.valid, -torch.inf)
        rows = scores.topk(min(count, scores.shape[1]), 1).indices
        return self.boxes.detach().gather(1, rows[..., None].expand(-1, -1, 4))


class Proposer(nn.Module):
    """A score and a box for every token, the box beginning as one around the token's cell."""

    def __init__(self, width: int, *, score: float) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.classes = class_branch(width, 1, score=score)
        self.boxes = box_branch(width)
        start_linear(self.project)

    def forward(self, memory: Tensor, geometry: Geometry) -> Proposals:
        begun, valid = first_boxes(geometry)
        hidden = self.norm(self.project(memory.where(valid[..., None], 0)))
        boxes = (self.boxes(hidden).float() + inverse_sigmoid(begun)).sigmoid()
        return Proposals(self.classes(hidden), boxes, valid)


def first_boxes(geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The box (B, S, 4) that each token starts from, and whether it may propose (B, S).

    It may unless it is on padding, or its box has a centre or size too near to the image's: near 0 and 1 a logit hardly
    moves.
    """
    side = SMALLEST * 2.0**geometry.levels
    sides = side[None, :, None].expand_as(geometry.centres)
    boxes = torch.cat([geometry.centres, sides], -1)
    inside = ((boxes > MARGIN) & (boxes < 1 - MARGIN)).all(-1)
    return boxes.clamp(MARGIN, 1 - MARGIN), inside & geometry.valid
