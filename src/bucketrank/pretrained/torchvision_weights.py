"""Weights of torchvision's detectors: its COCO weights, or a .safetensors file with the same names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models import get_model_weights

from bucketrank.detectors.hub_download import is_reachable

# The layers whose shape depends on the number of classes, as parts of the names of their tensors.
CLASS_LAYERS = (
    "roi_heads.box_predictor.",
    "roi_heads.mask_predictor.mask_fcn_logits.",
    "head.classification_head.cls_logits.",
    "head.classification_head.module_list.",  # SSD
)
COUNTER = "num_batches_tracked"  # of batch norms; frozen ones have none
CONVERT = "convert a file you trust with safetensors.torch.save_file(torch.load(file, weights_only=True), ...)"


def load_torchvision_weights(model: nn.Module, name: str, weights: str) -> list[str]:
    """Load ``weights`` (coco or a file) into a model; return the names of tensors that keep their initial values.

    Only tensors of class layers may keep them, where the number of classes differs. ValueError for weights of another
    architecture, ConnectionError if a download fails.
    """
    state = _download(name) if weights == "coco" else _read(Path(weights))
    own = model.state_dict()
    missing = [each for each in own if each not in state and not each.endswith(COUNTER)]
    unknown = [each for each in state if each not in own and not each.endswith(COUNTER)]
    reshaped = [each for each in own if each in state and own[each].shape != state[each].shape]
    misfits = [*missing, *unknown, *(each for each in reshaped if not each.startswith(CLASS_LAYERS))]
    if misfits:
        raise ValueError(
            f"detector.weights: expected weights of torchvision's {name}, got {weights} with {len(misfits)} tensors "
            f"that are missing, unknown or of another shape, like {misfits[0]}; choose the model of the file with "
            "--detector torchvision/MODEL"
        )
    fitting = {each: tensor for each, tensor in state.items() if each in own and each not in reshaped}
    model.load_state_dict(fitting, strict=False)
    return reshaped


def _download(name: str) -> dict[str, Tensor]:
    """Return torchvision's COCO weights, from the cache of torch.hub if they are there."""
    weights = get_model_weights(name).DEFAULT
    cached = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(weights.url).path).name
    try:
        if not cached.exists() and not is_reachable(weights.url):
            raise ConnectionError(f"no connection to {urlsplit(weights.url).hostname}")
        state: dict[str, Tensor] = weights.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the file has another hash
        reason = str(error).partition("\n")[0]
        raise ConnectionError(
            f"detector.weights: the COCO weights of {name} cannot be downloaded ({reason:.200}); put the file of "
            f"{weights.url} at {cached}, pass a file with --detector.weights FILE.safetensors, or start from random "
            "weights with --detector.weights null"
        ) from error
    return state


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"detector.weights: expected null, coco or an existing .safetensors file, got {path}")
    if path.suffix != ".safetensors":
        raise ValueError(f"detector.weights: expected a .safetensors file, got {path}; {CONVERT}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"detector.weights: expected a .safetensors file, got {path} with other contents ({error}); {CONVERT}"
        ) from error
