"""The COCO weights of torchvision's detectors, from the cache of torch.hub or downloaded."""

from __future__ import annotations

import pickle
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torchvision.models import get_model_weights

from bucketrank.detectors.hub_download import is_reachable


def coco_weights(name: str, *, setting: str, remedy: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of torchvision's COCO weights for the model ``name``, and the name of each label.

    torchvision checks the hash of a download, and only tensors are unpickled. A failure becomes a ConnectionError
    that starts with the ``setting`` and ends with the ``remedy``.
    """
    weights = get_model_weights(name).DEFAULT
    cached = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(weights.url).path).name
    try:
        if not cached.exists() and not is_reachable(weights.url):
            raise ConnectionError(f"no connection to {urlsplit(weights.url).hostname}")
        state: dict[str, Tensor] = weights.get_state_dict(progress=True, check_hash=True, weights_only=True)
    # RuntimeError: a download has another hash, or the file in the cache is damaged.
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ConnectionError(
            f"{setting}: the COCO weights of {name} cannot be read ({reason:.200}); "
            f"put the file of {weights.url} at {cached}, or {remedy}"
        ) from error
    return state, list(weights.meta["categories"])
