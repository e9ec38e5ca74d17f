"""The backbone: an ImageNet network that gives four maps of an image, at strides 4, 8, 16 and 32."""

from __future__ import annotations

import socket
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import timm
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bucketrank.catalogue import BackboneSettings
from bucketrank.detectors.deformable import make_deformable

STRIDES = [4, 8, 16, 32]
CONNECT_SECONDS = 5
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# The published configurations, with the drop path of the detectors trained on them, and where "pretrained" comes from.
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
SWIN_HUB = {
    "swin_tiny": "microsoft/swin-tiny-patch4-window7-224",
    "swin_large": "microsoft/swin-large-patch4-window12-384-in22k",
}


class Backbone(nn.Module):
    """Four maps (B, C, H / s, W / s), s = 4, 8, 16 and 32, of images (B, 3, H, W) of any size from 32 pixels.

    The images are expected as ``(image - mean) / std`` with the attributes ``mean`` and ``std``, for pixels in [0, 1].
    ``body`` gives the maps, perhaps among others: ``maps`` are the positions of the four.

    A parameter belongs to the first stage whose map depends on it; that is read off the graph, so it holds for any
    body. Those of the first ``frozen_stages`` stages are frozen, and those on which no map depends (a norm behind the
    last block): training them would only make distributed training wait for gradients that never come.

    Of an odd number of cells most networks keep the half cell at the border, as ResNet and Swin do; those that start
    with patches, such as ConvNeXt, drop it. A few, such as HRNet and DLA, take only multiples of 32.
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
        self.only_finest: list[str] = []
        self.frozen = self._to_freeze(frozen_stages)
        self.train()

    def forward(self, images: Tensor) -> list[Tensor]:
        outputs = self.body(images)
        outputs = getattr(outputs, "feature_maps", outputs)  # of transformers; timm gives a list
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

    def leave_out_finest(self) -> None:
        """Freeze also what only the first map depends on, such as a norm behind it: for necks that do not use it."""
        self.frozen += [name for name in self.only_finest if name not in self.frozen]
        self.train(self.training)

    def _to_freeze(self, stages: int) -> list[str]:
        self.eval()
        names, parameters = zip(*self.named_parameters(), strict=True)
        with torch.enable_grad():
            maps = self(parameters[0].new_zeros(1, 3, 32, 64))
        got = [tuple(m.shape[1:]) for m in maps]
        expected = [(c, 32 // s, 64 // s) for c, s in zip(self.channels, STRIDES, strict=True)]
        if got != expected:
            raise ValueError(f"Backbone: expected maps (C, H, W) of {expected} for an image of 32 x 64, got {got}")
        used = _depended_on(maps, parameters)
        others = _depended_on(maps[1:], parameters)
        self.only_finest = [name for name, o in zip(names, others, strict=True) if not o]
        frozen = _depended_on(maps[:stages], parameters)
        return [name for name, u, f in zip(names, used, frozen, strict=True) if f or not u]


def build_backbone(settings: BackboneSettings) -> Backbone:
    """The backbone of ``settings``, in training mode.

    >>> backbone = build_backbone(BackboneSettings(name="resnet18"))
    >>> [tuple(map.shape) for map in backbone(torch.rand(1, 3, 97, 131))]
    [(1, 64, 25, 33), (1, 128, 13, 17), (1, 256, 7, 9), (1, 512, 4, 5)]
    """
    settings.check_name()
    if settings.name in SWIN:
        body = _swin(settings.name, settings.weights)
        maps, channels, mean, std = [0, 1, 2, 3], list(body.channels), IMAGENET_MEAN, IMAGENET_STD
    else:
        body = _timm(settings.name, settings.weights)
        maps = _positions(settings.name, body.feature_info.reduction())
        channels = [body.feature_info.channels()[i] for i in maps]
        mean, std = tuple(body.pretrained_cfg["mean"]), tuple(body.pretrained_cfg["std"])
    if settings.deformable_groups:
        make_deformable(body, groups=settings.deformable_groups)
    weighted = settings.weights is not None
    frozen_stages = int(weighted) if settings.frozen_stages is None else settings.frozen_stages
    freeze_batch_norm = settings.batch_norm == "frozen" or (settings.batch_norm == "auto" and weighted)
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


def _depended_on(maps: list[Tensor], parameters: Iterable[Tensor]) -> list[bool]:
    """For each parameter, whether one of the maps depends on it."""
    parameters = list(parameters)
    if not maps:
        return [False] * len(parameters)
    total = torch.stack([m.sum() for m in maps]).sum()
    gradients = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
    return [gradient is not None for gradient in gradients]


def _timm(name: str, weights: str | None) -> Any:
    configuration = timm.get_pretrained_cfg(name)
    if configuration is not None and configuration.fixed_input_size:
        raise ValueError(
            f"BackboneSettings: expected name to be a model for images of any size, got {name!r} for "
            f"{configuration.input_size[1]} x {configuration.input_size[2]}; for Swin take {' or '.join(SWIN)}"
        )
    if weights is None:
        return timm.create_model(name, features_only=True)
    if weights == "pretrained":
        with _downloading(name):
            return timm.create_model(name, features_only=True, pretrained=True)
    _check_fit(name, weights)
    overlay = {"file": weights, "custom_load": False}
    return timm.create_model(name, features_only=True, pretrained=True, pretrained_cfg_overlay=overlay)


@contextmanager
def _downloading(name: str) -> Iterator[None]:
    """Where weights come from the hub, or from its cache; ConnectionError says what to do without them.

    Without a network only the cache is looked at: the hub's library would try again for a minute.
    """
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _reachable(constants.ENDPOINT)
    try:
        yield
    except OSError as error:
        host = urlsplit(constants.ENDPOINT).hostname
        reason = f"no connection to {host}" if constants.HF_HUB_OFFLINE else f"{error}".partition("\n")[0]
        raise ConnectionError(
            f"the pretrained weights of {name} cannot be downloaded ({reason:.200}); give a file by --backbone.weights "
            "FILE.safetensors, or start from random ones by --backbone.weights null"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _reachable(address: str) -> bool:
    """Whether something answers there within seconds; behind a proxy, that is left to be seen."""
    if {"all", "https"} & set(getproxies()):
        return True
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 443), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _positions(name: str, reductions: list[int]) -> list[int]:
    """Where the four strides are among a model's maps; of several maps with the same stride, the deepest."""
    if missing := [stride for stride in STRIDES if stride not in reductions]:
        raise ValueError(
            f"BackboneSettings: expected name to be a model with maps at strides {STRIDES}, got {name!r} with "
            f"{list(reductions)} and none at {missing}"
        )
    last = {reduction: i for i, reduction in enumerate(reductions)}
    return [last[stride] for stride in STRIDES]


def _read(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise FileNotFoundError(f"BackboneSettings: expected weights to be None, 'pretrained' or a path, got {path}")
    convert = "convert it where you trust it: safetensors.torch.save_file(torch.load(file, weights_only=True), ...)"
    if path.suffix != ".safetensors" or not path.is_file():
        raise ValueError(f"BackboneSettings: expected weights in a .safetensors file, got {path}; {convert}")
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"BackboneSettings: expected weights in a .safetensors file, got {path} with other contents ({error}); "
            f"{convert}"
        ) from error
    if not state:
        raise ValueError(f"BackboneSettings: expected weights in {path}, got a file without tensors")
    return state


def _check_fit(name: str, weights: str) -> None:
    """Raise unless a file has exactly the tensors of timm's whole model; its classifier may differ or be absent.

    Loading into a model of features is never strict in timm: it drops the head's tensors, and misses others silently.
    """
    state = _read(Path(weights))
    configuration = timm.get_pretrained_cfg(name)
    classifiers = configuration.classifier if configuration is not None else None
    for classifier in [classifiers] if isinstance(classifiers, str) else classifiers or ():
        state.pop(f"{classifier}.weight", None)
        state.pop(f"{classifier}.bias", None)
    overlay = {"state_dict": state, "classifier": None, "custom_load": False}
    try:
        timm.create_model(name, num_classes=0, pretrained=True, pretrained_cfg_overlay=overlay)
    except (KeyError, RuntimeError) as error:
        lines = [textwrap.shorten(line, 300) for line in str(error).splitlines()]
        rest = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise ValueError(
            f"BackboneSettings: expected weights that fit {name}, got {weights}: {' '.join(lines[:5])}{rest}"
        ) from error


def _swin(name: str, weights: str | None) -> Any:
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
            raise ValueError(f"BackboneSettings: expected weights in a folder with model.safetensors, got {weights}")
        source, options = weights, {"use_safetensors": True, "local_files_only": True}
    else:
        options = {"state_dict": _read(Path(weights))}
    with _downloading(name) if weights == "pretrained" else nullcontext():
        body, report = SwinBackbone.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # they are in the report
            output_loading_info=True,
            **options,
        )
    # A classifier has its own head, and none of the norms that a backbone puts behind each stage: they start anew.
    faults = {
        "missing": [key for key in report["missing_keys"] if not key.startswith("hidden_states_norms.")],
        "unexpected": [key for key in report["unexpected_keys"] if not key.startswith("classifier.")],
        "of another shape": [key for key, *_ in report["mismatched_keys"]],
    }
    if any(faults.values()):
        told = [f"{len(keys)} {what} ({', '.join(sorted(keys)[:3])}, ...)" for what, keys in faults.items() if keys]
        raise ValueError(f"BackboneSettings: expected weights that fit {name}, got {weights}: {'; '.join(told)}")
    return body


def _use_checkpointing(name: str, body: Any) -> None:
    if name in SWIN:
        body.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for part in body.children():  # each is recomputed from its input, which it must not have overwritten
        if getattr(part, "inplace", False):
            part.inplace = False
    owner = body if hasattr(body, "set_grad_checkpointing") else getattr(body, "model", None)
    try:
        owner.set_grad_checkpointing(enable=True)  # type: ignore[union-attr]
    except (AttributeError, AssertionError) as error:
        raise ValueError(
            f"BackboneSettings: expected checkpointing=False for {name!r}, which timm cannot checkpoint, got True"
        ) from error
