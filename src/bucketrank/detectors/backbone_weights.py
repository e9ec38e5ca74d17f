"""Weights files of backbones. Only safetensors are read, never pickles."""

from __future__ import annotations

import textwrap
from pathlib import Path

import timm
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file."""
    if not path.exists():
        raise FileNotFoundError(f"backbone.weights: expected null, pretrained or an existing file, got {path}")
    convert = "convert a file you trust with safetensors.torch.save_file(torch.load(file, weights_only=True), ...)"
    if path.suffix != ".safetensors" or not path.is_file():
        raise ValueError(f"backbone.weights: expected a .safetensors file, got {path}; {convert}")
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"backbone.weights: expected a .safetensors file, got {path} with other contents ({error}); {convert}"
        ) from error
    if not state:
        raise ValueError(f"backbone.weights: expected a file with tensors, got {path} without any")
    return state


def check_timm_weights(name: str, weights: str) -> None:
    """Raise unless a file has exactly the tensors of timm's whole model; its classifier may differ or be absent.

    timm never loads strictly into a model with ``features_only``: it drops the tensors of the head, and ignores
    missing ones.
    """
    state = read_weights(Path(weights))
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
            f"backbone.weights: expected weights that fit {name}, got {weights}: {' '.join(lines[:5])}{rest}"
        ) from error
