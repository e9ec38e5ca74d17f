"""The layers of the transformer, on the deformable attention of transformers; no other file knows that library.

Only its attention is taken: it brings a CUDA kernel where the package ``kernels`` is installed, and its parameters have
kept their names. The layers around it have not (between 5.0 and 5.22), which would make checkpoints unreadable.
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


@dataclass(frozen=True)
class TransformerSettings:
    """The sizes of the transformer. ``checkpointing`` recomputes a layer in the backward pass instead of storing it."""

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
                raise ValueError(f"co_detr: expected {name} of at least 1, got {getattr(self, name)}")
        if self.width % 32 or self.width % self.heads:
            raise ValueError(
                f"co_detr: expected channels to be a multiple of 32, the groups of its norms, and of its {self.heads} "
                f"heads, got {self.width}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"co_detr: expected dropout from 0 to below 1, got {self.dropout}")


class DeformableAttention(DeformableDetrMultiscaleDeformableAttention):
    """Every query looks at ``points`` places on every map, for each of its heads (Zhu et al., ICLR 2021, Eq. 3).

    Where it looks starts as a ring of directions, one for each head, a point further out than the one before; all count
    alike.
    """

    def __init__(self, settings: TransformerSettings) -> None:
        config = DeformableDetrConfig(d_model=settings.width, num_feature_levels=settings.levels)
        super().__init__(config, num_heads=settings.heads, n_points=settings.points)
        angles = torch.arange(settings.heads) * (2 * math.pi / settings.heads)
        ring = torch.stack([angles.cos(), angles.sin()], 1)
        ring = ring / ring.abs().amax(1, keepdim=True)
        far = torch.arange(1, settings.points + 1)[:, None]
        steps = (ring[:, None, None] * far).expand(-1, settings.levels, -1, -1)  # (heads, levels, points, 2)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(steps.flatten())
        nn.init.zeros_(self.sampling_offsets.weight)
        for layer in (self.attention_weights, self.value_proj, self.output_proj):
            nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.xavier_uniform_(self.value_proj.weight)
        nn.init.xavier_uniform_(self.output_proj.weight)

    def forward(self, queries: Tensor, places: Tensor, memory: Tensor, geometry: Geometry) -> Tensor:
        """``queries`` (B, Q, C) at ``places`` (B, Q, L, 2 or 4), in units of the maps, look at ``memory`` (B, S, C)."""
        attended: Tensor
        attended, _ = super().forward(
            hidden_states=queries,
            attention_mask=geometry.valid,
            encoder_hidden_states=memory,
            reference_points=places,
            spatial_shapes=geometry.extents,
            spatial_shapes_list=geometry.shapes,
            level_start_index=geometry.starts,
        )
        return attended


class FeedForward(nn.Module):
    """Two layers around a ReLU, added and normalised."""

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
                start_linear(layer)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.norm(hidden + self.layers(hidden))
        return found


class EncoderLayer(nn.Module):
    """Tokens look at tokens."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.attention = DeformableAttention(settings)
        self.dropout = nn.Dropout(settings.dropout)
        self.norm = nn.LayerNorm(settings.width)
        self.feedforward = FeedForward(settings)

    def forward(self, tokens: Tensor, positions: Tensor, places: Tensor, geometry: Geometry) -> Tensor:
        attended = self.attention(tokens + positions, places, tokens, geometry)
        found: Tensor = self.feedforward(self.norm(tokens + self.dropout(attended)))
        return found


class DecoderLayer(nn.Module):
    """Queries look at each other, then at the tokens."""

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

    def forward(self, hidden: Tensor, positions: Tensor, places: Tensor, memory: Tensor, geometry: Geometry) -> Tensor:
        asked = hidden + positions
        attended, _ = self.self_attention(asked, asked, hidden, need_weights=False)
        hidden = self.self_norm(hidden + self.dropout(attended))
        attended = self.attention(hidden + positions, places, memory, geometry)
        found: Tensor = self.feedforward(self.norm(hidden + self.dropout(attended)))
        return found


class Encoder(nn.Module):
    """From maps to memory: the tokens after layers in which each looks at others of all maps."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.width, self.checkpointing = settings.width, settings.checkpointing
        self.layers = nn.ModuleList(EncoderLayer(settings) for _ in range(settings.encoder_layers))
        self.level_positions = nn.Parameter(torch.randn(settings.levels, settings.width))

    def forward(self, maps: Sequence[Tensor], geometry: Geometry) -> Tensor:
        """(B, S, C) from maps (B, C, H, W)."""
        tokens = torch.cat([part.flatten(2).transpose(1, 2) for part in maps], 1)
        # On padding, which nobody looks at, places lie beyond 1.
        waves = sine_encoding(geometry.centres.flip(-1).clamp(max=1), self.width // 2)
        positions = waves + self.level_positions[geometry.levels]
        places = geometry.on_maps(geometry.centres)
        for layer in self.layers:
            tokens = run(layer, tokens, positions, places, geometry, again=self.checkpointing and self.training)
        return tokens


def run(layer: nn.Module, *inputs: Any, again: bool) -> Tensor:
    """``layer(*inputs)``; with ``again`` its inner values are not kept but computed again in the backward pass."""
    found: Tensor = checkpoint(layer, *inputs, use_reentrant=False) if again else layer(*inputs)
    return found


def start_linear(layer: nn.Linear) -> None:
    """As the transformer's layers start."""
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
