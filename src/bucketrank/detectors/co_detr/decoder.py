"""The proposal stage and the decoder.

Every token proposes a box, and the top proposals initialise the queries (DINO's mixed selection). In each decoder
layer, the queries attend to the image and refine their boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bucketrank.detectors.co_detr.transformer import (
    DecoderLayer,
    Geometry,
    TransformerSettings,
    box_branch,
    class_branch,
    inverse_sigmoid,
    run_layer,
    sine_encoding,
)
from bucketrank.detectors.layers import initialise_linear


@dataclass(frozen=True)
class Queries:
    """K queries for each of B images: content, positional encodings and initial boxes."""

    content: Tensor  # (B, K, C)
    positions: Tensor  # (B, K, C)
    boxes: Tensor  # (B, K, 4) relative (cx, cy, w, h), without gradient


@dataclass(frozen=True)
class Decoded:
    """Predictions of one layer for the queries."""

    logits: Tensor  # (B, K, classes)
    boxes: Tensor  # (B, K, 4) relative (cx, cy, w, h)


class Decoder(nn.Module):
    """Decoder layers, each with its own class and box branches.

    A layer attends at the detached boxes of the previous layer. In its loss, the refined boxes keep the gradient of the
    previous layer, but not of earlier ones: DINO's "look forward twice" (Zhang et al., 2022).
    """

    def __init__(self, settings: TransformerSettings, *, num_classes: int, score: float) -> None:
        super().__init__()
        count, width = settings.decoder_layers, settings.width
        self.checkpointing = settings.checkpointing
        self.layers = nn.ModuleList(DecoderLayer(settings) for _ in range(count))
        self.classes = nn.ModuleList(class_branch(width, num_classes, score=score) for _ in range(count))
        self.boxes = nn.ModuleList(box_branch(width) for _ in range(count))

    def forward(self, queries: Queries, memory: Tensor, geometry: Geometry) -> list[Decoded]:
        """Run all layers; return the predictions of each."""
        hidden, decoded = queries.content, []
        previous = reference = queries.boxes.detach()  # the same boxes, with and without gradient
        for layer, classes, boxes in zip(self.layers, self.classes, self.boxes, strict=True):
            locations = geometry.on_maps(reference)
            inputs = (hidden, queries.positions, locations, memory, geometry)
            hidden = run_layer(layer, *inputs, checkpointing=self.checkpointing and self.training)
            change = boxes(hidden).float()
            decoded.append(Decoded(classes(hidden), (change + inverse_sigmoid(previous)).sigmoid()))
            previous = (change + inverse_sigmoid(reference)).sigmoid()
            reference = previous.detach()
        return decoded


class BoxEncoding(nn.Module):
    """Encode a box as two vectors, computed from the sine encoding of its centre and size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.project = nn.Linear(2 * width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        initialise_linear(self.project)

    def forward(self, boxes: Tensor) -> Sequence[Tensor]:
        """Compute two encodings (B, K, C) of relative ``boxes`` (B, K, 4)."""
        return torch.chunk(self.norm(self.project(sine_encoding(boxes, self.width // 2))), 2, -1)


class SelectedQueries(nn.Module):
    """The detecting queries: learned content, and the top proposals as boxes (DINO's mixed selection)."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.content = nn.Parameter(torch.randn(count, width))
        self.encoding = BoxEncoding(width)

    def forward(self, boxes: Tensor) -> Queries:
        positions, _ = self.encoding(boxes)
        # A small image may have fewer tokens, hence fewer proposals, than queries.
        content = self.content[: boxes.shape[1]].expand(len(boxes), -1, -1)
        return Queries(content, positions, boxes)


FINEST_SIDE = 0.05  # initial side of a proposal on the finest map, relative to the image; doubles per level
MARGIN = 0.01  # minimum distance of proposal coordinates from 0 and 1


@dataclass(frozen=True)
class Proposals:
    """The proposals of all tokens."""

    logits: Tensor  # (B, S, 1 or classes); the first is the objectness
    boxes: Tensor  # (B, S, 4) relative (cx, cy, w, h)
    valid: Tensor  # (B, S) mask of tokens that may propose

    def best(self, count: int) -> Tensor:
        """Select the detached boxes (B, K, 4) of the top ``count`` scores, or of all tokens if there are fewer."""
        scores = self.logits.detach()[..., 0].float().masked_fill(~self.valid, -torch.inf)
        rows = scores.topk(min(count, scores.shape[1]), 1).indices
        return self.boxes.detach().gather(1, rows[..., None].expand(-1, -1, 4))


class Proposer(nn.Module):
    """Predict a score and a box for every token, the box relative to an initial box around its cell."""

    def __init__(self, width: int, *, score: float, logits: int = 1) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.classes = class_branch(width, logits, score=score)
        self.boxes = box_branch(width)
        initialise_linear(self.project)

    def forward(self, memory: Tensor, geometry: Geometry) -> Proposals:
        initial, valid = initial_boxes(geometry)
        hidden = self.norm(self.project(memory.where(valid[..., None], 0)))
        boxes = (self.boxes(hidden).float() + inverse_sigmoid(initial)).sigmoid()
        return Proposals(self.classes(hidden), boxes, valid)


def initial_boxes(geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Compute the initial box (B, S, 4) of each token, and the mask (B, S) of tokens that may propose.

    A token may not propose if it lies on padding, or if a coordinate of its box is within MARGIN of 0 or 1: there the
    sigmoid is so flat that a box can hardly be refined.
    """
    side = FINEST_SIDE * 2.0**geometry.levels
    sides = side[None, :, None].expand_as(geometry.centres)
    boxes = torch.cat([geometry.centres, sides], -1)
    inside = ((boxes > MARGIN) & (boxes < 1 - MARGIN)).all(-1)
    return boxes.clamp(MARGIN, 1 - MARGIN), inside & geometry.valid
