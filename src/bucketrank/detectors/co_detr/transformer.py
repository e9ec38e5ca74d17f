"""The layers of the encoder and the decoder, around the deformable attention of the library transformers.

Only the attention comes from that library. It has a CUDA kernel if the package ``kernels`` is installed, and the names
of its parameters are stable. The names in its encoder and decoder layers changed between 5.0 and 5.22, which would make
checkpoints unreadable.
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

from bucketrank.detectors.co_detr.geometry import Geometry, sine_encoding
from bucketrank.detectors.initialisation import initialise_linear


@dataclass(frozen=True)
class TransformerSettings:
    """Sizes of the transformer. With ``checkpointing``, the backward pass recomputes the activations of each layer."""

    width: int = 256
    heads: int = 8
    points: int = 4
    levels: int = 4
    feedforward: int = 2048
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float = 0.0
    checkpointing: bool = False

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
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                initialise_linear(layer)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.norm(hidden + self.layers(hidden))
        return output


class EncoderLayer(nn.Module):
    """Deformable self-attention of the tokens, and a feed-forward block."""

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
    """Self-attention of the queries, deformable attention to the tokens, and a feed-forward block."""

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
        self, hidden: Tensor, positions: Tensor, locations: Tensor, memory: Tensor, geometry: Geometry
    ) -> Tensor:
        positioned = hidden + positions
        attended, _ = self.self_attention(positioned, positioned, hidden, need_weights=False)
        hidden = self.self_norm(hidden + self.dropout(attended))
        attended = self.attention(hidden + positions, locations, memory, geometry)
        output: Tensor = self.feedforward(self.norm(hidden + self.dropout(attended)))
        return output


class Encoder(nn.Module):
    """The encoder: the cells of all maps become tokens, which attend to each other in every layer."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.width, self.checkpointing = settings.width, settings.checkpointing
        self.layers = nn.ModuleList(EncoderLayer(settings) for _ in range(settings.encoder_layers))
        self.level_positions = nn.Parameter(torch.randn(settings.levels, settings.width))

    def forward(self, maps: Sequence[Tensor], geometry: Geometry) -> Tensor:
        """Return the memory (B, S, C) of maps (B, C, H, W)."""
        tokens = torch.cat([level.flatten(2).transpose(1, 2) for level in maps], 1)
        # Locations on padding exceed 1; no query attends to them.
        encoded = sine_encoding(geometry.centres.flip(-1).clamp(max=1), self.width // 2)
        positions = encoded + self.level_positions[geometry.levels]
        locations = geometry.on_maps(geometry.centres)
        for layer in self.layers:
            checkpointing = self.checkpointing and self.training
            tokens = run_layer(layer, tokens, positions, locations, geometry, checkpointing=checkpointing)
        return tokens


def run_layer(layer: nn.Module, *inputs: Any, checkpointing: bool) -> Tensor:
    """Return ``layer(*inputs)``; with ``checkpointing``, the backward pass recomputes its activations."""
    output: Tensor = checkpoint(layer, *inputs, use_reentrant=False) if checkpointing else layer(*inputs)
    return output
