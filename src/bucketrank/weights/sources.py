"""Weights from elsewhere: the Hugging Face hub, safetensors files, timm backbones and torchvision detectors.

Only safetensors files are read. torchvision's own downloads are checked by hash and unpickled as tensors only.
"""

from __future__ import annotations

import pickle
import re
import socket
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import timm
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models import get_model_weights

from bucketrank.errors import first_line

CONNECT_SECONDS = 5
CONVERT = "convert a file you trust with safetensors.torch.save_file(torch.load(file, weights_only=True), ...)"
# Layers whose shape depends on the number of classes, as prefixes of their tensor names.
CLASS_LAYERS = (
    "roi_heads.box_predictor.",
    "roi_heads.mask_predictor.mask_fcn_logits.",
    "head.classification_head.cls_logits.",
    "head.classification_head.module_list.",  # SSD
)
OTHER_WEIGHTS = (
    "pass a file with --detector.weights FILE.safetensors, or start from random weights with --detector.weights null"
)
SIZE_MISMATCH = re.compile(r"size mismatch for ([\w.]+):")  # part of torch's message
COUNTER = "num_batches_tracked"  # exists in batch norms, but not in frozen ones


def downloading(name: str) -> AbstractContextManager[None]:
    """Turn a failed download of the weights of ``name`` into a ConnectionError that says what to do."""
    remedy = "pass a file with --backbone.weights FILE.safetensors, or start from random weights with "
    return hub_access(f"backbone.weights: the pretrained weights of {name}", remedy + "--backbone.weights null")


@contextmanager
def hub_access(content: str, remedy: str, *, action: str = "downloaded") -> Iterator[None]:
    """Turn a failure to download (or ``action``) ``content`` into a ConnectionError with reason and ``remedy``.

    If the hub is unreachable, only the cache is read, because ``huggingface_hub`` would retry for a minute.
    """
    with hub_offline(offline=not is_reachable(constants.ENDPOINT)):
        try:
            yield
        except OSError as error:
            host = urlsplit(constants.ENDPOINT).hostname
            reason = f"no connection to {host}" if constants.HF_HUB_OFFLINE else first_line(error)
            raise ConnectionError(f"{content} cannot be {action} ({reason:.200}); {remedy}") from error


@contextmanager
def hub_offline(*, offline: bool = True) -> Iterator[None]:
    """Let ``huggingface_hub`` read only its cache; with ``offline`` False, keep its setting."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def is_reachable(address: str) -> bool:
    """Return whether the host accepts a connection within CONNECT_SECONDS; always True behind a proxy."""
    if {"all", "https"} & set(getproxies()):
        return True
    parts = urlsplit(address)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def read_safetensors(path: Path, *, setting: str, others: str) -> dict[str, Tensor]:
    """Read the tensors of the file that a setting names; ``others`` are accepted values that are not file names.

    Raises FileNotFoundError if the file does not exist, and ValueError if it has other contents or none.
    """
    if not path.exists():
        raise FileNotFoundError(f"{setting}: expected {others} or an existing .safetensors file, got {path}")
    if path.suffix != ".safetensors" or not path.is_file():
        raise ValueError(f"{setting}: expected a .safetensors file, got {path}; {CONVERT}")
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{setting}: expected a .safetensors file, got {path} with other contents ({error}); {CONVERT}"
        ) from error
    if not state:
        raise ValueError(f"{setting}: expected a file with tensors, got {path} without any; write it again")
    return state


def read_backbone_weights(path: Path) -> dict[str, Tensor]:
    """Read the .safetensors file that ``backbone.weights`` names."""
    return read_safetensors(path, setting="backbone.weights", others="null, pretrained")


def check_timm_weights(name: str, weights: str) -> None:
    """Raise unless a file has exactly the tensors of timm's whole model; its classifier may differ or be absent.

    timm never loads strictly into a model with ``features_only``: it drops the head's tensors and ignores missing ones.
    """
    state = read_backbone_weights(Path(weights))
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


def coco_weights(name: str, *, setting: str, remedy: str) -> tuple[dict[str, Tensor], list[str]]:
    """Get torchvision's COCO weights for the model ``name`` from the torch.hub cache or by download, and label names.

    torchvision checks the hash of a download, and only tensors are unpickled. A failure becomes a ConnectionError that
    starts with the ``setting`` and ends with the ``remedy``.
    """
    weights = get_model_weights(name).DEFAULT
    cached = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(weights.url).path).name
    try:
        if not cached.exists() and not is_reachable(weights.url):
            raise ConnectionError(f"no connection to {urlsplit(weights.url).hostname}")
        state: dict[str, Tensor] = weights.get_state_dict(progress=True, check_hash=True, weights_only=True)
    # RuntimeError means that a download has another hash or the cached file is damaged.
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ConnectionError(
            f"{setting}: the COCO weights of {name} cannot be read ({first_line(error):.200}); "
            f"put the file of {weights.url} at {cached}, or {remedy}"
        ) from error
    return state, list(weights.meta["categories"])


def load_torchvision_weights(model: nn.Module, name: str, weights: str) -> list[str]:
    """Load ``weights`` (coco or a file) into a torchvision detector; return the names of the unchanged tensors.

    Only class layers may stay unchanged, if the number of classes differs. Most COCO weights use tensor names of
    earlier torchvision versions, which torchvision itself renames. Raises ValueError for weights of another
    architecture, and ConnectionError if a download fails.
    """
    if weights == "coco":
        state, _ = coco_weights(name, setting="detector.weights", remedy=OTHER_WEIGHTS)
    else:
        state = read_safetensors(Path(weights), setting="detector.weights", others="null, coco")
    own = model.state_dict()
    reshaped = [
        each for each in own if each.startswith(CLASS_LAYERS) and each in state and own[each].shape != state[each].shape
    ]
    try:
        keys = model.load_state_dict({each: state[each] for each in state if each not in reshaped}, strict=False)
        misfits = [*(each for each in keys.missing_keys if each not in reshaped), *keys.unexpected_keys]
    except RuntimeError as error:
        misfits = SIZE_MISMATCH.findall(str(error)) or [first_line(error)]
    misfits = [each for each in misfits if not each.endswith(COUNTER)]
    if misfits:
        raise ValueError(
            f"detector.weights: expected weights of torchvision's {name}, got {weights} with {len(misfits)} tensors "
            f"that are missing, unknown or of another shape, like {misfits[0]}; choose the model of the file with "
            "--detector torchvision/MODEL"
        )
    return reshaped
