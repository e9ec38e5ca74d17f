"""The proposal stage and the decoder.

Every token proposes a box, and the top proposals initialise the queries (DINO's mixed selection). In each decoder
layer, the queries attend to the image and refine their boxes. Co-DETR and Co-DINO share both; ``dino`` in the settings
tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bucketrank.detectors.co_detr.transformer import (
    DINO_EDGE,
    EDGE,
    DecoderLayer,
    Geometry,
    TransformerSettings,
    box_branch,
    class_branch,
    inverse_sigmoid,
    run_layer,
    sine_encoding,
)
from bucketrank.detectors.layers import initialise_linears


@dataclass(frozen=True)
class Queries:
    """K queries for each of B images: content, positional encodings and initial boxes."""

    content: Tensor  # (B, K, C)
    positions: Tensor | None  # (B, K, C); None in Co-DINO, whose decoder computes them from the boxes of each layer
    boxes: Tensor  # (B, K, 4) relative (cx, cy, w, h), without gradient
    hides: Tensor | None = None  # (K, K) mask: the query of a row does not see that of a column; None: it sees all


@dataclass(frozen=True)
class Decoded:
    """Predictions of one layer for the queries."""

    logits: Tensor  # (B, K, classes)
    boxes: Tensor  # (B, K, 4) relative (cx, cy, w, h)


class Decoder(nn.Module):
    """Decoder layers, each with its own class and box branches.

    A layer attends at the detached boxes of the previous layer. In its loss, the refined boxes keep the gradient of the
    previous layer, but not of earlier ones: DINO's "look forward twice" (Zhang et al., 2022).

    In Co-DINO, the positions of the queries follow their boxes from layer to layer, and the predictions are made from
    normed states. The boxes passed on are refined from the states without the norm, by the same branch.
    """

    def __init__(self, settings: TransformerSettings, *, num_classes: int, score: float) -> None:
        super().__init__()
        count, width = settings.decoder_layers, settings.width
        self.checkpointing = settings.checkpointing
        self.edge = DINO_EDGE if settings.dino else EDGE
        self.layers = nn.ModuleList(DecoderLayer(settings) for _ in range(count))
        self.classes = nn.ModuleList(class_branch(width, num_classes, score=score) for _ in range(count))
        self.boxes = nn.ModuleList(box_branch(width) for _ in range(count))
        self.positions = PositionHead(width) if settings.dino else None
        self.norm = nn.LayerNorm(width) if settings.dino else None

    def forward(self, queries: Queries, memory: Tensor, geometry: Geometry) -> list[Decoded]:
        """Run all layers; return the predictions of each."""
        hidden, decoded = queries.content, []
        previous = reference = queries.boxes.detach()  # the same boxes, with and without gradient
        for layer, classes, boxes in zip(self.layers, self.classes, self.boxes, strict=True):
            locations = geometry.on_maps(reference)
            positions = queries.positions if self.positions is None else self.positions(locations[:, :, 0])
            inputs = (hidden, positions, locations, memory, geometry, queries.hides)
            hidden = run_layer(layer, *inputs, checkpointing=self.checkpointing and self.training)
            state = hidden if self.norm is None else self.norm(hidden)
            change = boxes(state).float()
            decoded.append(Decoded(classes(state), (change + self.logits(previous)).sigmoid()))
            if len(decoded) < len(self.layers):
                change = change if self.norm is None else boxes(hidden).float()
                previous = (change + self.logits(reference)).sigmoid()
                reference = previous.detach()
        return decoded

    def logits(self, boxes: Tensor) -> Tensor:
        """Compute the logits to which a layer adds its change."""
        return inverse_sigmoid(boxes, edge=self.edge)


class PositionHead(nn.Sequential):
    """Co-DINO's query positions: an MLP of the sine encoding of a box, in the order y, x, w, h."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.width = width
        initialise_linears(self)

    def forward(self, boxes: Tensor) -> Tensor:
        """Compute positions (B, K, C) of boxes (B, K, 4), relative to the finest map."""
        encoded = sine_encoding(boxes[..., [1, 0, 2, 3]], self.width // 2)
        positions: Tensor = super().forward(encoded)  # type: ignore[no-untyped-call]
        return positions


class BoxEncoding(nn.Module):
    """Encode a box as one or two vectors, computed from the sine encoding of its centre and size."""

    def __init__(self, width: int, *, vectors: int = 2) -> None:
        super().__init__()
        self.width, self.vectors = width, vectors
        self.project = nn.Linear(2 * width, vectors * width)
        self.norm = nn.LayerNorm(vectors * width)
        initialise_linears(self.project)

    def forward(self, boxes: Tensor) -> Sequence[Tensor]:
        """Compute the encodings (B, K, C) of relative ``boxes`` (B, K, 4)."""
        return torch.chunk(self.norm(self.project(sine_encoding(boxes, self.width // 2))), self.vectors, -1)


class SelectedQueries(nn.Module):
    """The detecting queries: learned content, and the top proposals as boxes (DINO's mixed selection)."""

    def __init__(self, width: int, count: int, *, dino: bool = False) -> None:
        super().__init__()
        self.count = count
        self.content = nn.Parameter(torch.randn(count, width))
        self.encoding = None if dino else BoxEncoding(width)

    def forward(self, boxes: Tensor) -> Queries:
        positions = None if self.encoding is None else self.encoding(boxes)[0]
        # A small image may have fewer tokens, hence fewer proposals, than queries.
        content = self.content[: boxes.shape[1]].expand(len(boxes), -1, -1)
        return Queries(content, positions, boxes)


FINEST_SIDE = 0.05  # initial side of a proposal on the finest map, relative to the image; doubles per level
MARGIN = 0.01  # minimum distance of proposal coordinates from 0 and 1


@dataclass(frozen=True)
class Proposals:
    """The proposals of all tokens.

    Co-DETR selects by the first logit, the objectness, and only valid tokens. Co-DINO (``by_class``) selects by the
    highest class logit. There, as published, all invalid tokens share one score and the box (1, 1, 1, 1).
    """

    logits: Tensor  # (B, S, 1 or classes)
    boxes: Tensor  # (B, S, 4) relative (cx, cy, w, h)
    valid: Tensor  # (B, S) mask of tokens that may propose
    by_class: bool = False

    def top(self, count: int) -> Tensor:
        """Find the tokens (B, K) with the top ``count`` scores, best first, or all tokens if there are fewer."""
        logits = self.logits.detach().float()
        scores = logits.amax(-1) if self.by_class else logits[..., 0].masked_fill(~self.valid, -torch.inf)
        return scores.topk(min(count, scores.shape[1]), 1).indices

    def at(self, tokens: Tensor) -> Decoded:
        """Select the proposals of ``tokens`` (B, K)."""
        logits, boxes = (
            each.gather(1, tokens[..., None].expand(-1, -1, each.shape[-1])) for each in (self.logits, self.boxes)
        )
        return Decoded(logits, boxes)

    def best(self, count: int) -> Tensor:
        """Select the detached boxes (B, K, 4) of the top ``count`` scores, or of all tokens if there are fewer."""
        return self.at(self.top(count)).boxes.detach()


class Proposer(nn.Module):
    """Predict a score and a box for every token, the box relative to an initial box around its cell."""

    def __init__(self, width: int, *, score: float, logits: int = 1, dino: bool = False) -> None:
        super().__init__()
        self.dino = dino
        self.project = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.classes = class_branch(width, logits, score=score)
        self.boxes = box_branch(width)
        initialise_linears(self.project)

    def forward(self, memory: Tensor, geometry: Geometry) -> Proposals:
        initial, valid = initial_boxes(geometry)
        hidden = self.norm(self.project(memory.where(valid[..., None], 0)))
        boxes = (self.boxes(hidden).float() + inverse_sigmoid(initial)).sigmoid()
        if self.dino:
            boxes = boxes.masked_fill(~valid[..., None], 1.0)
        return Proposals(self.classes(hidden), boxes, valid, by_class=self.dino)


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
