"""The backbone: an ImageNet network that returns four feature maps, at strides 4, 8, 16 and 32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

STRIDES = [4, 8, 16, 32]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Backbone(nn.Module):
    """Four maps (B, C, H / s, W / s), s = 4, 8, 16 and 32, of images (B, 3, H, W) of any size from 32 pixels.

    The input is ``(image - mean) / std`` with the attributes ``mean`` and ``std``, for pixels in [0, 1]. ``body``
    returns a list of maps; ``maps`` holds the positions of the four in that list.

    A parameter belongs to the first stage whose map depends on it. Autograd tells which map depends on which
    parameter, so this holds for any body. The parameters of the first ``frozen_stages`` stages are frozen. So are
    parameters that no map depends on, such as a norm after the last block: they never receive a gradient, and
    distributed training would wait for one.

    If the number of cells is odd, most networks, such as ResNet and Swin, keep the half cell at the border. Networks
    that start with patches, such as ConvNeXt, drop it. A few, such as HRNet and DLA, require multiples of 32.
    """

    def __init__(
        self,
        body: nn.Module,
        *,
        maps: list[int],
        channels: list[int],
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
        frozen_stages: int = 0,
        freeze_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.body = body
        self.maps = maps
        self.channels = channels
        self.strides = list(STRIDES)
        self.mean, self.std = mean, std
        self.freeze_batch_norm = freeze_batch_norm
        self.frozen: list[str] = []  # names of parameters
        self.only_finest: list[str] = []  # names of parameters that no map but the first depends on
        self.frozen = self._parameters_to_freeze(frozen_stages)
        self.train()

    def forward(self, images: Tensor) -> list[Tensor]:
        outputs = self.body(images)
        outputs = getattr(outputs, "feature_maps", outputs)  # transformers returns an object, timm a list
        return [outputs[i] for i in self.maps]

    def train(self, mode: bool = True) -> Backbone:  # noqa: FBT001, FBT002
        super().train(mode)
        for name in self.frozen:
            self.get_parameter(name).requires_grad = False
        for module in self.body.modules():
            parameters = list(module.parameters())
            frozen = bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
            if frozen or (self.freeze_batch_norm and isinstance(module, _BatchNorm)):
                module.eval()
        return self

    def freeze_only_finest(self) -> None:
        """Freeze the parameters that only the first map depends on, for necks that do not use that map."""
        self.frozen += [name for name in self.only_finest if name not in self.frozen]
        self.train(self.training)

    def _parameters_to_freeze(self, stages: int) -> list[str]:
        self.eval()
        names, parameters = zip(*self.named_parameters(), strict=True)
        with torch.enable_grad():
            maps = self(parameters[0].new_zeros(1, 3, 32, 64))
        shapes = [tuple(each.shape[1:]) for each in maps]
        expected = [(c, 32 // s, 64 // s) for c, s in zip(self.channels, STRIDES, strict=True)]
        if shapes != expected:
            raise ValueError(f"Backbone: expected maps (C, H, W) of {expected} for an image of 32 x 64, got {shapes}")
        used = _has_influence(parameters, maps)
        used_by_coarser = _has_influence(parameters, maps[1:])
        in_frozen_stage = _has_influence(parameters, maps[:stages])
        self.only_finest = [name for name, coarser in zip(names, used_by_coarser, strict=True) if not coarser]
        return [name for name, use, frozen in zip(names, used, in_frozen_stage, strict=True) if frozen or not use]


@torch.enable_grad()
def _has_influence(parameters: Iterable[Tensor], maps: list[Tensor]) -> list[bool]:
    """For each parameter, return whether one of the maps depends on it."""
    parameters = list(parameters)
    if not maps:
        return [False] * len(parameters)
    total = torch.stack([each.sum() for each in maps]).sum()
    gradients = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
    return [gradient is not None for gradient in gradients]
