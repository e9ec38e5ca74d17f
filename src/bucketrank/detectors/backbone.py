"""Backbones: timm networks and Swin Transformers, with feature maps at strides 4, 8, 16 and 32.

ResNets may use deformable convolutions (DCNv2). Swin comes from transformers, because timm's needs a fixed image size.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops import DeformConv2d

from bucketrank.settings import BackboneSettings
from bucketrank.weights.sources import check_timm_weights, downloading, read_backbone_weights

STRIDES = [4, 8, 16, 32]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Backbone(nn.Module):
    """A backbone: four maps (B, C, H / s, W / s), s = 4, 8, 16, 32, from images (B, 3, H, W) of at least 32 pixels.

    The input is ``(image - mean) / std`` with the attributes ``mean`` and ``std``, for pixels in [0, 1]. ``body``
    returns a list of maps; ``maps`` holds the indices of the four.

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
        self.frozen: list[str] = []  # parameter names
        self.only_finest: list[str] = []  # names of parameters that only the first map depends on
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
        """Freeze the parameters that only the first map depends on, for necks without that map."""
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
    """Return for each parameter whether any of the maps depends on it."""
    parameters = list(parameters)
    if not maps:
        return [False] * len(parameters)
    total = torch.stack([each.sum() for each in maps]).sum()
    gradients = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
    return [gradient is not None for gradient in gradients]


STAGES = ("layer2", "layer3", "layer4")  # timm's names for stages 3 to 5 of the ResNet paper


class DeformableConv2d(DeformConv2d):
    """A convolution with predicted sampling offsets and weights (Zhu et al., Deformable ConvNets v2, CVPR 2019).

    ``y(p) = sum_k 2 sigmoid(m_k(p)) w_k x(p + p_k + o_k(p))``: a convolution of the same shape, ``predictor``, predicts
    the offsets ``o`` (y and x of each kernel cell) of each of ``offset_groups`` channel groups, then the logits ``m``.

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
        self.weight = convolution.weight  # same name as in a checkpoint of the plain network
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


def make_deformable(body: nn.Module, *, groups: int) -> None:
    """Make every 3x3 convolution in stages 3 to 5 of a timm ResNet deformable, in place.

    A bottleneck (ResNet-50 and deeper) has one such convolution, a basic block (ResNet-18 and -34) two.
    """
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


# Published configurations, with the drop path rate used in detectors.
SWIN: dict[str, dict[str, Any]] = {
    "swin_tiny": {
        "embed_dim": 96,
        "depths": [2, 2, 6, 2],
        "num_heads": [3, 6, 12, 24],
        "window_size": 7,
        "drop_path_rate": 0.2,
    },
    "swin_large": {
        "embed_dim": 192,
        "depths": [2, 2, 18, 2],
        "num_heads": [6, 12, 24, 48],
        "window_size": 12,
        "drop_path_rate": 0.3,
    },
}
# Hub repositories of the pretrained weights.
SWIN_HUB = {
    "swin_tiny": "microsoft/swin-tiny-patch4-window7-224",
    "swin_large": "microsoft/swin-large-patch4-window12-384-in22k",
}


def build_swin(name: str, weights: str | None) -> Any:
    """Build a Swin Transformer; ``weights`` as in ``BackboneSettings``."""
    from transformers import SwinBackbone, SwinConfig  # takes seconds

    config = SwinConfig(**SWIN[name], out_features=["stage1", "stage2", "stage3", "stage4"])
    if weights is None:
        return SwinBackbone(config)
    source: str | None = None
    options: dict[str, Any] = {}
    if weights == "pretrained":
        source = SWIN_HUB[name]
    elif Path(weights).is_dir():
        if not any(Path(weights).glob("model*.safetensors")):
            raise ValueError(f"backbone.weights: expected a folder with model.safetensors, got {weights}")
        source, options = weights, {"use_safetensors": True, "local_files_only": True}
    else:
        options = {"state_dict": read_backbone_weights(Path(weights))}
    with downloading(name) if weights == "pretrained" else nullcontext():
        body, report = SwinBackbone.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # the report lists them
            output_loading_info=True,
            **options,
        )
    _check_report(name, weights, report)
    return body


def _check_report(name: str, weights: str, report: dict[str, Any]) -> None:
    """Raise unless all tensors were loaded.

    A classifier's file has an extra head, and lacks the norms that a backbone puts after each stage: these start as
    ones and zeros.
    """
    faults = {
        "missing": [key for key in report["missing_keys"] if not key.startswith("hidden_states_norms.")],
        "unexpected": [key for key in report["unexpected_keys"] if not key.startswith("classifier.")],
        "of another shape": [key for key, *_ in report["mismatched_keys"]],
    }
    if any(faults.values()):
        parts = [f"{len(keys)} {fault} ({', '.join(sorted(keys)[:3])}, ...)" for fault, keys in faults.items() if keys]
        raise ValueError(f"backbone.weights: expected weights that fit {name}, got {weights}: {'; '.join(parts)}")


def build_backbone(settings: BackboneSettings) -> Backbone:
    """Build a backbone from its settings, in training mode.

    >>> import torch
    >>> backbone = build_backbone(BackboneSettings(name="resnet18"))
    >>> [tuple(map.shape) for map in backbone(torch.rand(1, 3, 97, 131))]
    [(1, 64, 25, 33), (1, 128, 13, 17), (1, 256, 7, 9), (1, 512, 4, 5)]
    """
    settings.check_name()
    if settings.name in SWIN:
        body = build_swin(settings.name, settings.weights)
        maps, channels, mean, std = [0, 1, 2, 3], list(body.channels), IMAGENET_MEAN, IMAGENET_STD
    else:
        body = _build_timm(settings.name, settings.weights)
        maps = stride_positions(settings.name, body.feature_info.reduction())
        channels = [body.feature_info.channels()[i] for i in maps]
        mean, std = tuple(body.pretrained_cfg["mean"]), tuple(body.pretrained_cfg["std"])
    if settings.deformable_groups:
        make_deformable(body, groups=settings.deformable_groups)
    has_weights = settings.weights is not None
    frozen_stages = int(has_weights) if settings.frozen_stages is None else settings.frozen_stages
    freeze_batch_norm = settings.batch_norm == "frozen" or (settings.batch_norm == "auto" and has_weights)
    backbone = Backbone(
        body,
        maps=maps,
        channels=channels,
        mean=mean,
        std=std,
        frozen_stages=frozen_stages,
        freeze_batch_norm=freeze_batch_norm,
    )
    if settings.checkpointing:
        _use_checkpointing(settings.name, body)
    return backbone


def stride_positions(name: str, reductions: list[int]) -> list[int]:
    """Find the four strides among a model's maps; return the index of the deepest map of each stride."""
    if missing := [stride for stride in STRIDES if stride not in reductions]:
        raise ValueError(
            f"backbone.name: expected a model with maps at strides {STRIDES}, got {name!r} with "
            f"{list(reductions)} and without {missing}"
        )
    last = {reduction: i for i, reduction in enumerate(reductions)}
    return [last[stride] for stride in STRIDES]


def _build_timm(name: str, weights: str | None) -> Any:
    configuration = timm.get_pretrained_cfg(name)
    if configuration is not None and configuration.fixed_input_size:
        raise ValueError(
            f"backbone.name: expected a model for images of any size, got {name!r} for "
            f"{configuration.input_size[1]} x {configuration.input_size[2]}; for Swin use {' or '.join(SWIN)}"
        )
    if weights is None:
        return timm.create_model(name, features_only=True)
    if weights == "pretrained":
        if configuration is None or not configuration.has_weights:
            raise ValueError(
                f"backbone.weights: expected null or a file for {name}, for which timm has no weights, got pretrained"
            )
        with downloading(name):
            return timm.create_model(name, features_only=True, pretrained=True)
    check_timm_weights(name, weights)
    overlay = {"file": weights, "custom_load": False}
    return timm.create_model(name, features_only=True, pretrained=True, pretrained_cfg_overlay=overlay)


def _use_checkpointing(name: str, body: Any) -> None:
    if name in SWIN:
        body.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for part in body.children():  # a recomputed part must not overwrite its input
        if getattr(part, "inplace", False):
            part.inplace = False
    owner = body if hasattr(body, "set_grad_checkpointing") else getattr(body, "model", None)
    try:
        owner.set_grad_checkpointing(enable=True)  # type: ignore[union-attr]
    except (AttributeError, AssertionError) as error:
        raise ValueError(
            f"backbone.checkpointing: expected false for {name!r}, which timm cannot checkpoint, got true"
        ) from error
