"""The feature pyramid (FPN), and weight initialisation shared by all detectors."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool


def initialise_classifier(layer: nn.Linear | nn.Conv2d, score: float) -> None:
    """Initialise with small random weights and the bias for which every candidate has this score."""
    nn.init.normal_(layer.weight, std=0.01)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, math.log(score / (1 - score)))


def initialise_linears(module: nn.Module) -> None:
    """Initialise all linear layers with Xavier-uniform weights and zero bias, as usual in transformers."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


EXTRAS = ("pool", "convs_on_output", "convs_on_output_relu", "convs_on_input")


class FeaturePyramid(nn.Module):
    """A feature pyramid: five maps with ``out_channels`` each from the backbone maps C2 to C5 (strides 4 to 32).

    The levels up to P5 are torchvision's ``FeaturePyramidNetwork``: 1x1 laterals, nearest-neighbour upsampling, 3x3
    outputs, no norms. ``extra`` selects the levels above P5. One-stage detectors use P3 to P7 (strides 8 to 128):

    - ``"pool"``: P2 to P6 (strides 4 to 64) for two-stage detectors, P6 by torchvision's ``LastLevelMaxPool``;
    - ``"convs_on_output"``: a 3x3 convolution of stride 2 on P5, and another on P6 (ATSS and PAA in the recipes);
    - ``"convs_on_output_relu"``: the same, with a ReLU between P6 and P7 (torchvision's RetinaNet);
    - ``"convs_on_input"``: as ``"convs_on_output"``, but the first on C5 (RetinaNet in the recipes).

    Parameter names match torchvision's ``LastLevelP6P7``, which always has the ReLU, and selects P5 or C5 by their
    channels.

    >>> import torch
    >>> neck = FeaturePyramid([64, 128, 256, 512], 32, extra="convs_on_output")
    >>> maps = neck([torch.rand(1, c, 128 // s, 128 // s) for c, s in zip([64, 128, 256, 512], [4, 8, 16, 32])])
    >>> [(stride, *map.shape[1:]) for stride, map in zip(neck.strides, maps)]
    [(8, 32, 16, 16), (16, 32, 8, 8), (32, 32, 4, 4), (64, 32, 2, 2), (128, 32, 1, 1)]
    """

    def __init__(self, channels: list[int], out_channels: int = 256, *, extra: str = "pool") -> None:
        super().__init__()
        if len(channels) != 4:
            raise ValueError(f"FeaturePyramid: expected channels of 4 maps (strides 4 to 32), got {channels}")
        if extra not in EXTRAS:
            raise ValueError(f"FeaturePyramid: expected extra to be one of {', '.join(EXTRAS)}, got {extra!r}")
        self.out_channels = out_channels
        self.first_level = 2 if extra == "pool" else 3
        self.strides = [2**level for level in range(self.first_level, self.first_level + 5)]
        used = channels[self.first_level - 2 :]
        top: ExtraFPNBlock = LastLevelMaxPool()
        if extra != "pool":
            on_input = extra == "convs_on_input"
            width = used[-1] if on_input else out_channels
            top = Strided(width, out_channels, on_input=on_input, relu=extra == "convs_on_output_relu")
        self.pyramid = FeaturePyramidNetwork(used, out_channels, extra_blocks=top)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        if len(maps) != 4:
            raise ValueError(f"FeaturePyramid: expected 4 maps (strides 4 to 32), got {len(maps)}")
        named = {f"p{level}": maps[level - 2] for level in range(self.first_level, 6)}
        return list(self.pyramid(named).values())


class Strided(ExtraFPNBlock):
    """Extra levels by 3x3 convolutions of stride 2: ``p6`` on P5 or C5, ``p7`` on P6, optionally after a ReLU."""

    def __init__(self, in_channels: int, out_channels: int, *, on_input: bool, relu: bool) -> None:
        super().__init__()
        self.on_input, self.relu = on_input, relu
        for level in (6, 7):
            convolution = nn.Conv2d(in_channels if level == 6 else out_channels, out_channels, 3, stride=2, padding=1)
            nn.init.kaiming_uniform_(convolution.weight, a=1)  # like torchvision's pyramid
            nn.init.constant_(convolution.get_parameter("bias"), 0)
            self.add_module(f"p{level}", convolution)

    def forward(self, results: list[Tensor], x: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        below = x[-1] if self.on_input else results[-1]
        for name, convolution in self.named_children():
            below = convolution(below.relu() if self.relu and name != "p6" else below)
            results.append(below)
            names.append(name)
        return results, names
