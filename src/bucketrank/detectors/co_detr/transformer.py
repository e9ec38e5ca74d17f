"""The deformable transformer: token geometry, sine encoding, prediction branches, encoder and decoder layers.

The deformable attention itself is that of the transformers library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DeformableDetrConfig
from transformers.models.deformable_detr.modeling_deformable_detr import DeformableDetrMultiscaleDeformableAttention

from bucketrank.detectors.layers import initialise_classifier, initialise_linears

EDGE, DINO_EDGE = 1e-5, 1e-3  # minimum distance of a coordinate from 0 and 1 when its logit is computed
TEMPERATURE = 10000.0  # ratio of the longest to the shortest wavelength
DINO_TEMPERATURE = 20.0  # the same for the cells in Co-DINO's encoder


@dataclass(frozen=True)
class Geometry:
    """The S tokens per image, for B images: the cells of L maps, row by row, level after level.

    The images of a batch are padded to one size; locations are relative to the image without padding.
    """

    shapes: list[tuple[int, int]]  # height and width of the maps
    extents: Tensor  # (L, 2) shapes as a tensor
    starts: Tensor  # (L,) first token of each map
    levels: Tensor  # (S,) map index of each token
    valid: Tensor  # (B, S) mask of tokens on the image, not on padding
    centres: Tensor  # (B, S, 2) cell centres as x and y
    ends: Tensor  # (B, S, 2) far corners of the cells, at most 1; 0 where the row (x) or column (y) is padding
    ratios: Tensor  # (B, L, 2) fraction of each map's width and height that the image covers

    @classmethod
    def of(cls, maps: Sequence[Tensor], padded: tuple[int, int], image_sizes: list[tuple[int, int]]) -> Geometry:
        """Build the geometry of maps (B, C, H, W) of images padded to ``padded`` (height, width).

        A cell lies on the image if its first pixel does, as if the image's mask were resized by nearest neighbour.
        """
        device = maps[0].device
        shapes = [(int(level.shape[-2]), int(level.shape[-1])) for level in maps]
        sizes = torch.tensor(image_sizes, device=device)  # (B, 2) as y, x
        valid, centres, ends, ratios, levels = [], [], [], [], []
        for number, shape in enumerate(shapes):
            rows, columns = (torch.arange(cells, device=device) for cells in shape)
            inside = [
                cells * padded_size // len(cells) < image_size[:, None]
                for cells, padded_size, image_size in zip((rows, columns), padded, sizes.unbind(1), strict=True)
            ]  # (B, rows) and (B, columns)
            covered = [axis.sum(1, keepdim=True) for axis in inside]
            y, x = ((cells + 0.5) / count for cells, count in zip((rows, columns), covered, strict=True))
            on_rows, on_columns = inside[0][:, :, None], inside[1][:, None]
            valid.append((on_rows & on_columns).flatten(1))
            grid = torch.broadcast_tensors(x[:, None], y[:, :, None])
            centres.append(torch.stack(grid, -1).flatten(1, 2))
            y, x = (((cells + 1) / count).clamp(max=1) for cells, count in zip((rows, columns), covered, strict=True))
            ends.append(torch.stack([x[:, None] * on_rows, y[:, :, None] * on_columns], -1).flatten(1, 2))
            ratios.append(torch.cat([covered[1] / shape[1], covered[0] / shape[0]], 1))
            levels.append(torch.full((shape[0] * shape[1],), number, device=device))
        extents = torch.tensor(shapes, device=device)
        counts = extents.prod(1)
        return cls(
            shapes=shapes,
            extents=extents,
            starts=counts.cumsum(0) - counts,
            levels=torch.cat(levels),
            valid=torch.cat(valid, 1),
            centres=torch.cat(centres, 1),
            ends=torch.cat(ends, 1),
            ratios=torch.stack(ratios, 1),
        )

    def maps(self, tokens: Tensor) -> list[Tensor]:
        """Reshape ``tokens`` (B, S, C) to maps (B, C, H, W)."""
        parts = tokens.split([height * width for height, width in self.shapes], 1)
        return [part.transpose(1, 2).unflatten(2, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def on_maps(self, locations: Tensor) -> Tensor:
        """Convert points or boxes (B, Q, 2 or 4) relative to the image to (B, Q, L, 2 or 4) relative to each map."""
        ratios = self.ratios.repeat(1, 1, locations.shape[-1] // 2)
        return locations[:, :, None] * ratios[:, None]


def sine_encoding(coordinates: Tensor, width: int, *, temperature: float = TEMPERATURE) -> Tensor:
    """Encode coordinates (..., n) from 0 to 1 as (..., n * width): alternating sine and cosine, wavelengths rising."""
    steps = torch.arange(width // 2, device=coordinates.device)
    frequencies = 2 * math.pi * temperature ** (-2 * steps / width)
    angles = coordinates.float()[..., None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-3)


def inverse_sigmoid(coordinates: Tensor, *, edge: float = EDGE) -> Tensor:
    """Compute the logits of coordinates; their distances from 0 and from 1 count as at least ``edge``."""
    clamped = coordinates.float().clamp(0, 1)
    return (clamped.clamp(min=edge) / (1 - clamped).clamp(min=edge)).log()


def class_branch(width: int, classes: int, *, score: float) -> nn.Linear:
    """Build a linear classifier (..., classes) with initial scores near ``score``."""
    branch = nn.Linear(width, classes)
    initialise_classifier(branch, score)
    return branch


def box_branch(width: int) -> nn.Sequential:
    """Build an MLP that predicts logit offsets (..., 4) of (cx, cy, w, h), initially 0."""
    last = nn.Linear(width, 4)
    branch = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)
    initialise_linears(branch)
    nn.init.zeros_(last.weight)
    return branch


@dataclass(frozen=True)
class TransformerSettings:
    """Transformer sizes. With ``checkpointing``, the backward pass recomputes the activations of each layer.

    ``dino`` selects Co-DINO's transformer: other positions of the tokens, query positions that follow the boxes from
    layer to layer, and a norm in front of the predictions.
    """

    width: int = 256
    heads: int = 8
    points: int = 4
    levels: int = 4
    feedforward: int = 2048
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float = 0.0
    checkpointing: bool = False
    dino: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "points", "feedforward", "encoder_layers", "decoder_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"detector.{name}: expected at least 1, got {getattr(self, name)}")
        if self.width % 32 or self.width % self.heads:
            raise ValueError(
                f"detector.channels: expected a multiple of 32, the groups of the norms, and of {self.heads}, the "
                f"attention heads, got {self.width}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"detector.dropout: expected at least 0 and less than 1, got {self.dropout}")


class DeformableAttention(DeformableDetrMultiscaleDeformableAttention):
    """Every head of a query samples ``points`` locations on every map (Zhu et al., Deformable DETR, ICLR 2021, Eq. 3).

    Initially each head samples along its own direction, point k at k cells from the query, with equal weights.
    """

    def __init__(self, settings: TransformerSettings) -> None:
        config = DeformableDetrConfig(d_model=settings.width, num_feature_levels=settings.levels)
        super().__init__(config, num_heads=settings.heads, n_points=settings.points)
        angles = torch.arange(settings.heads) * (2 * math.pi / settings.heads)
        ring = torch.stack([angles.cos(), angles.sin()], 1)
        ring = ring / ring.abs().amax(1, keepdim=True)
        distances = torch.arange(1, settings.points + 1)[:, None]
        offsets = (ring[:, None, None] * distances).expand(-1, settings.levels, -1, -1)  # (heads, levels, points, 2)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(offsets.flatten())
        nn.init.zeros_(self.sampling_offsets.weight)
        for layer in (self.attention_weights, self.value_proj, self.output_proj):
            nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.xavier_uniform_(self.value_proj.weight)
        nn.init.xavier_uniform_(self.output_proj.weight)

    def forward(self, queries: Tensor, locations: Tensor, memory: Tensor, geometry: Geometry) -> Tensor:
        """Attend from queries (B, Q, C) to ``memory`` (B, S, C) at ``locations`` (B, Q, L, 2 or 4) on the maps."""
        attended: Tensor
        attended, _ = super().forward(
            hidden_states=queries,
            attention_mask=geometry.valid,
            encoder_hidden_states=memory,
            reference_points=locations,
            spatial_shapes=geometry.extents,
            spatial_shapes_list=geometry.shapes,
            level_start_index=geometry.starts,
        )
        return attended


class FeedForward(nn.Module):
    """Two linear layers with a ReLU between, a residual connection and a norm."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(settings.width, settings.feedforward),
            nn.ReLU(),
            nn.Dropout(settings.dropout),
            nn.Linear(settings.feedforward, settings.width),
            nn.Dropout(settings.dropout),
        )
        self.norm = nn.LayerNorm(settings.width)
        initialise_linears(self.layers)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.norm(hidden + self.layers(hidden))
        return output


class EncoderLayer(nn.Module):
    """Deformable self-attention over the tokens, and a feed-forward block."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.attention = DeformableAttention(settings)
        self.dropout = nn.Dropout(settings.dropout)
        self.norm = nn.LayerNorm(settings.width)
        self.feedforward = FeedForward(settings)

    def forward(self, tokens: Tensor, positions: Tensor, locations: Tensor, geometry: Geometry) -> Tensor:
        attended = self.attention(tokens + positions, locations, tokens, geometry)
        output: Tensor = self.feedforward(self.norm(tokens + self.dropout(attended)))
        return output


class DecoderLayer(nn.Module):
    """Self-attention over the queries, deformable cross-attention to the tokens, and a feed-forward block."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.self_attention = nn.MultiheadAttention(
            settings.width, settings.heads, dropout=settings.dropout, batch_first=True
        )
        self.self_norm = nn.LayerNorm(settings.width)
        self.attention = DeformableAttention(settings)
        self.norm = nn.LayerNorm(settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.feedforward = FeedForward(settings)
        nn.init.xavier_uniform_(self.self_attention.out_proj.weight)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        locations: Tensor,
        memory: Tensor,
        geometry: Geometry,
        hides: Tensor | None = None,
    ) -> Tensor:
        """Run the layer; the query of row i does not see that of column j where ``hides`` (K, K) is true."""
        positioned = hidden + positions
        attended, _ = self.self_attention(positioned, positioned, hidden, attn_mask=hides, need_weights=False)
        hidden = self.self_norm(hidden + self.dropout(attended))
        attended = self.attention(hidden + positions, locations, memory, geometry)
        output: Tensor = self.feedforward(self.norm(hidden + self.dropout(attended)))
        return output


class Encoder(nn.Module):
    """The encoder: the cells of all maps become tokens that attend to each other."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.width, self.checkpointing, self.dino = settings.width, settings.checkpointing, settings.dino
        self.layers = nn.ModuleList(EncoderLayer(settings) for _ in range(settings.encoder_layers))
        self.level_positions = nn.Parameter(torch.randn(settings.levels, settings.width))

    def forward(self, maps: Sequence[Tensor], geometry: Geometry) -> Tensor:
        """Encode maps (B, C, H, W) as memory (B, S, C)."""
        tokens = torch.cat([level.flatten(2).transpose(1, 2) for level in maps], 1)
        if self.dino:
            encoded = sine_encoding(geometry.ends.flip(-1), self.width // 2, temperature=DINO_TEMPERATURE)
        else:  # locations on padding exceed 1; no query attends to them
            encoded = sine_encoding(geometry.centres.flip(-1).clamp(max=1), self.width // 2)
        positions = encoded + self.level_positions[geometry.levels]
        locations = geometry.on_maps(geometry.centres)
        for layer in self.layers:
            checkpointing = self.checkpointing and self.training
            tokens = run_layer(layer, tokens, positions, locations, geometry, checkpointing=checkpointing)
        return tokens


def run_layer(layer: nn.Module, *inputs: Any, checkpointing: bool) -> Tensor:
    """Call a layer; with ``checkpointing``, the backward pass recomputes its activations."""
    output: Tensor = checkpoint(layer, *inputs, use_reentrant=False) if checkpointing else layer(*inputs)
    return output
