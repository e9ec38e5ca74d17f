"""The head of the one-stage detectors: two towers of convolutions, shared by all levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.ops.misc import Conv2dNormActivation

from bucketrank.detectors.initialisation import initialise_classifier


@dataclass(frozen=True)
class DenseOutput:
    """The predictions for B images with A anchors each, level after level."""

    logits: Tensor  # (B, A, C)
    box_deltas: Tensor  # (B, A, 4)
    quality: Tensor | None  # (B, A) logits
    per_level: list[int]  # number of anchors of each level


class DenseHead(nn.Module):
    """Predict class logits, box deltas and, with ``quality``, one quality logit for every anchor."""

    def __init__(
        self,
        channels: int,
        *,
        num_classes: int,
        anchors: int,
        levels: int,
        convs: int = 4,
        normalise: bool = True,
        scale: bool = True,
        quality: bool = False,
        prior: float = 0.01,
    ) -> None:
        super().__init__()
        if normalise and channels % 32:
            raise ValueError(
                f"detector.channels: expected a multiple of 32, the groups of the head's norms, got {channels}"
            )
        # At least two channels per group: the map of a small image may have a single cell.
        norm = (lambda width: nn.GroupNorm(min(32, width // 2), width)) if normalise else None
        towers = [[Conv2dNormActivation(channels, channels, norm_layer=norm) for _ in range(convs)] for _ in range(2)]
        self.class_tower, self.box_tower = (nn.Sequential(*tower) for tower in towers)
        self.classes = nn.Conv2d(channels, anchors * num_classes, 3, padding=1)
        self.boxes = nn.Conv2d(channels, anchors * 4, 3, padding=1)
        self.quality = nn.Conv2d(channels, anchors, 3, padding=1) if quality else None
        self.scales = nn.Parameter(torch.ones(levels)) if scale else None  # factors of the box deltas, one per level
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.01)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        initialise_classifier(self.classes, prior)

    def forward(self, features: list[Tensor]) -> DenseOutput:
        logits, box_deltas, quality = [], [], []
        for level, feature in enumerate(features):
            hidden = self.box_tower(feature)
            logits.append(_by_anchor(self.classes(self.class_tower(feature)), self.classes.out_channels, self.boxes))
            deltas = self.boxes(hidden) if self.scales is None else self.boxes(hidden) * self.scales[level]
            box_deltas.append(_by_anchor(deltas, self.boxes.out_channels, self.boxes))
            if self.quality is not None:
                quality.append(_by_anchor(self.quality(hidden), self.quality.out_channels, self.boxes).squeeze(2))
        return DenseOutput(
            logits=torch.cat(logits, 1),
            box_deltas=torch.cat(box_deltas, 1),
            quality=torch.cat(quality, 1) if quality else None,
            per_level=[part.shape[1] for part in box_deltas],
        )


def _by_anchor(maps: Tensor, channels: int, boxes: nn.Conv2d) -> Tensor:
    """Reshape (B, anchors * K, H, W) to (B, H * W * anchors, K), the order of the anchors."""
    anchors = boxes.out_channels // 4
    return maps.permute(0, 2, 3, 1).reshape(maps.shape[0], -1, channels // anchors)
