"""The head of the one-stage detectors: two towers of convolutions, shared by all levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.ops.misc import Conv2dNormActivation

from bucketrank.detectors.initialise import start_classifier


@dataclass(frozen=True)
class DenseOutput:
    """For B images and A anchors each: what the head says, levels one after another."""

    logits: Tensor  # (B, A, C)
    codes: Tensor  # (B, A, 4)
    quality: Tensor | None  # (B, A)
    per_level: list[int]  # anchors of each level


class DenseHead(nn.Module):
    """Class logits, box codes and, where asked for, one quality logit for every anchor."""

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
            raise ValueError(f"expected channels to be a multiple of 32, the groups of the head's norm, got {channels}")
        # Two channels a group at least: the map of a small image may have a single cell.
        norm = (lambda width: nn.GroupNorm(min(32, width // 2), width)) if normalise else None
        towers = [[Conv2dNormActivation(channels, channels, norm_layer=norm) for _ in range(convs)] for _ in range(2)]
        self.class_tower, self.box_tower = (nn.Sequential(*tower) for tower in towers)
        self.classes = nn.Conv2d(channels, anchors * num_classes, 3, padding=1)
        self.boxes = nn.Conv2d(channels, anchors * 4, 3, padding=1)
        self.quality = nn.Conv2d(channels, anchors, 3, padding=1) if quality else None
        self.scales = nn.Parameter(torch.ones(levels)) if scale else None  # of the codes, one for each level
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.01)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        start_classifier(self.classes, prior)

    def forward(self, features: list[Tensor]) -> DenseOutput:
        logits, codes, quality = [], [], []
        for level, feature in enumerate(features):
            boxes = self.box_tower(feature)
            logits.append(_by_anchor(self.classes(self.class_tower(feature)), self.classes.out_channels, self.boxes))
            code = self.boxes(boxes) if self.scales is None else self.boxes(boxes) * self.scales[level]
            codes.append(_by_anchor(code, self.boxes.out_channels, self.boxes))
            if self.quality is not None:
                quality.append(_by_anchor(self.quality(boxes), self.quality.out_channels, self.boxes).squeeze(2))
        return DenseOutput(
            logits=torch.cat(logits, 1),
            codes=torch.cat(codes, 1),
            quality=torch.cat(quality, 1) if quality else None,
            per_level=[part.shape[1] for part in codes],
        )


def _by_anchor(maps: Tensor, channels: int, boxes: nn.Conv2d) -> Tensor:
    """(B, anchors * K, H, W) to (B, H * W * anchors, K), the order in which anchors are numbered."""
    anchors = boxes.out_channels // 4
    return maps.permute(0, 2, 3, 1).reshape(maps.shape[0], -1, channels // anchors)
