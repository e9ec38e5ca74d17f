"""Modulated deformable convolution (DCNv2), and the replacement of a ResNet's convolutions by it."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn
from torchvision.ops import DeformConv2d

STAGES = ("layer2", "layer3", "layer4")  # timm's names of the ResNet paper's stages 3 to 5


class DeformableConv2d(DeformConv2d):
    """A convolution with predicted sampling offsets and weights (Zhu et al., Deformable ConvNets v2, CVPR 2019).

    ``y(p) = sum_k 2 sigmoid(m_k(p)) w_k x(p + p_k + o_k(p))``: a convolution of the same shape, ``predictor``, returns
    for each of ``offset_groups`` groups of channels the offsets ``o`` (y and x of each cell of the kernel), then the
    logits ``m``.

    The predictor starts at zero, so the layer starts as the plain convolution with the same ``weight``: the output of a
    pretrained network stays the same after the replacement. Published implementations omit the factor 2 and start at
    half that output. Both can represent the same functions, because ``2 sigmoid(m) w = sigmoid(m) (2 w)``: to load
    their weights, halve ``weight`` and keep the predictor.

    >>> layer = DeformableConv2d(nn.Conv2d(8, 16, 3, stride=2, padding=1), offset_groups=4)
    >>> layer(torch.rand(1, 8, 9, 9)).shape, layer.predictor.weight.shape[0]
    (torch.Size([1, 16, 5, 5]), 108)
    """

    def __init__(self, convolution: nn.Conv2d, *, offset_groups: int) -> None:
        geometry: dict[str, Any] = {
            "kernel_size": convolution.kernel_size,
            "stride": convolution.stride,
            "padding": convolution.padding,
            "dilation": convolution.dilation,
        }
        channels = convolution.in_channels, convolution.out_channels
        super().__init__(*channels, **geometry, groups=convolution.groups, bias=convolution.bias is not None)
        self.weight = convolution.weight  # the name in a checkpoint of the plain network
        self.bias = convolution.bias
        height, width = convolution.kernel_size
        self.predictor = nn.Conv2d(convolution.in_channels, 3 * offset_groups * height * width, **geometry)
        self.predictor.to(convolution.weight)
        for parameter in self.predictor.parameters():
            nn.init.zeros_(parameter)

    def forward(self, features: Tensor) -> Tensor:
        # Half precision would round the offsets, which are in cells of the map; the CPU kernel does not support it.
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(self.weight.dtype)
            predicted = self.predictor(features)
            cut = predicted.shape[1] // 3 * 2
            offsets, logits = predicted[:, :cut], predicted[:, cut:]
            sampled: Tensor = super().forward(features, offsets, 2 * logits.sigmoid())
        return sampled


def make_deformable(body: nn.Module, *, groups: int) -> list[str]:
    """Replace every 3x3 convolution in stages 3 to 5 of timm's ResNet ``body``, in place; return their names.

    This is one convolution of a bottleneck (ResNet-50 and deeper) and two of a basic block (ResNet-18 and -34).
    """
    names: list[str] = []
    for stage in STAGES:
        blocks = getattr(body, stage, None)
        if blocks is None or not all(isinstance(block, BasicBlock | Bottleneck) for block in blocks):
            raise ValueError(
                f"backbone.deformable_groups: expected 0 for a backbone that is not one of timm's ResNets, got {groups}"
            )
        for name, module in list(blocks.named_modules(prefix=stage)):
            if not isinstance(module, nn.Conv2d) or module.kernel_size != (3, 3):
                continue
            if module.in_channels % groups:
                raise ValueError(
                    f"backbone.deformable_groups: expected a divisor of {module.in_channels}, the input channels of "
                    f"{name}, got {groups}"
                )
            parent, _, child = name.rpartition(".")
            setattr(body.get_submodule(parent), child, DeformableConv2d(module, offset_groups=groups))
            names.append(name)
    return names
