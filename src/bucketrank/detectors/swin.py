"""Swin Transformers as backbones, from the library transformers: those of timm require images of a fixed size."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from bucketrank.detectors.backbone_weights import read_weights
from bucketrank.detectors.hub_download import downloading

# The published configurations. The drop path rate is that of the detectors trained on them.
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
# The repositories of the pretrained weights.
SWIN_HUB = {
    "swin_tiny": "microsoft/swin-tiny-patch4-window7-224",
    "swin_large": "microsoft/swin-large-patch4-window12-384-in22k",
}


def build_swin(name: str, weights: str | None) -> Any:
    """Build a Swin; ``weights`` as in ``BackboneSettings``."""
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
        options = {"state_dict": read_weights(Path(weights))}
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

    A file of a classifier has a head of its own, and lacks the norms that a backbone puts after each stage: these start
    as ones and zeros.
    """
    faults = {
        "missing": [key for key in report["missing_keys"] if not key.startswith("hidden_states_norms.")],
        "unexpected": [key for key in report["unexpected_keys"] if not key.startswith("classifier.")],
        "of another shape": [key for key, *_ in report["mismatched_keys"]],
    }
    if any(faults.values()):
        parts = [f"{len(keys)} {fault} ({', '.join(sorted(keys)[:3])}, ...)" for fault, keys in faults.items() if keys]
        raise ValueError(f"backbone.weights: expected weights that fit {name}, got {weights}: {'; '.join(parts)}")
