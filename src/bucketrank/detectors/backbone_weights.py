"""Weights files of backbones. Only safetensors are read, never pickles."""

from __future__ import annotations

import textwrap
from pathlib import Path

import timm
from torch import Tensor

from bucketrank.detectors.safetensors_reading import read_safetensors


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file."""
    return read_safetensors(path, setting="backbone.weights", others="null, pretrained")


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
