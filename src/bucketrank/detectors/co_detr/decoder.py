"""The decoder: queries that look at the image, layer by layer, each layer moving their boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bucketrank.detectors.co_detr.branches import box_branch, class_branch
from bucketrank.detectors.co_detr.geometry import Geometry, inverse_sigmoid, sine_encoding
from bucketrank.detectors.co_detr.transformer import DecoderLayer, TransformerSettings, run, start_linear


@dataclass(frozen=True)
class Queries:
    """K for each of B images: what they ask, where, and the boxes they start from."""

    content: Tensor  # (B, K, C)
    positions: Tensor  # (B, K, C)
    boxes: Tensor  # (B, K, 4) centre and size, in units of the image, without gradient


@dataclass(frozen=True)
class Decoded:
    """What one layer says of the queries."""

    logits: Tensor  # (B, K, classes)
    boxes: Tensor  # (B, K, 4) centre and size, in units of the image


class Decoder(nn.Module):
    """Layers with their own branches for classes and boxes.

    A layer begins with the boxes of the one before, without gradient. The box it is judged by begins with the same,
    with the gradient of the layer before, and only of that one: each layer looks forward twice (Zhang et al., DINO,
    2022).
    """

    def __init__(self, settings: TransformerSettings, *, num_classes: int, score: float) -> None:
        super().__init__()
        count, width = settings.decoder_layers, settings.width
        self.checkpointing = settings.checkpointing
        self.layers = nn.ModuleList(DecoderLayer(settings) for _ in range(count))
        self.classes = nn.ModuleList(class_branch(width, num_classes, score=score) for _ in range(count))
        self.boxes = nn.ModuleList(box_branch(width) for _ in range(count))

    def forward(self, queries: Queries, memory: Tensor, geometry: Geometry) -> list[Decoded]:
        """What each layer says."""
        hidden, decoded = queries.content, []
        before = begin = queries.boxes.detach()
        for layer, classes, boxes in zip(self.layers, self.classes, self.boxes, strict=True):
            places = geometry.on_maps(begin)
            inputs = (hidden, queries.positions, places, memory, geometry)
            hidden = run(layer, *inputs, again=self.checkpointing and self.training)
            step = boxes(hidden).float()
            decoded.append(Decoded(classes(hidden), (step + inverse_sigmoid(before)).sigmoid()))
            before = (step + inverse_sigmoid(begin)).sigmoid()
            begin = before.detach()
        return decoded


class BoxEncoding(nn.Module):
    """What a transformer is told of a box: two vectors from the waves of its centre and size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.project = nn.Linear(2 * width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        start_linear(self.project)

    def forward(self, boxes: Tensor) -> Sequence[Tensor]:
        """``boxes`` (B, K, 4) in units of the image, to two of (B, K, C)."""
        return torch.chunk(self.norm(self.project(sine_encoding(boxes, self.width // 2))), 2, -1)


class SelectedQueries(nn.Module):
    """The queries that detect: what they ask is learned, where they ask comes from the proposals (mixed selection)."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.content = nn.Parameter(torch.randn(count, width))
        self.encoding = BoxEncoding(width)

    def forward(self, boxes: Tensor) -> Queries:
        positions, _ = self.encoding(boxes)
        # A small image has fewer tokens, and so fewer proposals, than there are queries.
        content = self.content[: boxes.shape[1]].expand(len(boxes), -1, -1)
        return Queries(content, positions, boxes)
