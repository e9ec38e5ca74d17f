"""The input of the transformer: four maps of equal width, at strides 8 to 64, from the maps of a backbone."""

from __future__ import annotations

from torch import Tensor, nn


class LevelProjection(nn.Module):
    """Project C3 to C5 by 1x1 convolutions, and add a map at stride 64 by a 3x3 convolution of stride 2 on C5."""

    strides = (8, 16, 32, 64)

    def __init__(self, channels: list[int], width: int) -> None:
        super().__init__()
        used = channels[1:]
        self.levels = nn.ModuleList(normalised(count, width, kernel=1) for count in used)
        self.top = normalised(used[-1], width, kernel=3)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the maps at strides 8 to 64 from those at strides 4 to 32; the first is not used."""
        used = maps[1:]
        return [*(level(feature) for level, feature in zip(self.levels, used, strict=True)), self.top(used[-1])]


def normalised(channels: int, width: int, *, kernel: int) -> nn.Sequential:
    """Return a convolution, of stride 2 unless it is 1x1, with a group norm and no activation."""
    stride, padding = (1, 0) if kernel == 1 else (2, 1)
    convolution = nn.Conv2d(channels, width, kernel, stride=stride, padding=padding, bias=False)
    nn.init.xavier_uniform_(convolution.weight)
    # At least two channels per group: the map of a small image may have a single cell.
    return nn.Sequential(convolution, nn.GroupNorm(min(32, width // 2), width))
