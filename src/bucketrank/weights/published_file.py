"""Checkpoint files of MMDetection, read without running any code that they contain.

A checkpoint is a pickle. ``torch.load(weights_only=True)`` creates tensors and plain containers only. Files of mmengine
also name classes of mmengine and numpy, for the training history. Inert stand-ins replace them: they accept any state
and keep none. A file that names anything else is refused; it is never unpickled in full.
"""

from __future__ import annotations

import ast
import hashlib
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bucketrank.data.annotations import is_text
from bucketrank.errors import WeightsError
from bucketrank.weights.files import is_weights_file

EMA = "ema_"  # mmcv's prefix of averaged copies: "ema_backbone_conv1_weight"
MAX_NAMES = 100_000  # class names that a file may have
MAX_NUMBERS = 2**30  # total over all tensors; Co-DETR with Swin-L has 0.2 billion


class Inert:
    """Takes the place of a class or function in a checkpoint: any arguments and any state, none of them kept."""

    def __new__(cls, *_arguments: Any) -> Inert:
        return super().__new__(cls)

    def __setstate__(self, _state: Any) -> None:
        pass


# What checkpoints hold besides tensors: histories of losses, random states and configurations.
INERT = (
    "_codecs.encode",
    "builtins.getattr",  # a history stores its own methods by name
    "datetime.datetime",
    "mmengine.logging.history_buffer.HistoryBuffer",
    "mmengine.logging.message_hub.MessageHub",
    "mmengine.visualization.visualizer.Visualizer",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
)
# Dictionaries of settings become plain ones.
DICTIONARIES = (
    "addict.addict.Dict",
    "mmcv.utils.config.ConfigDict",
    "mmengine.config.config.ConfigDict",
    "mmengine.config.ConfigDict",
)


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a published checkpoint, and what it says about itself."""

    path: Path
    state: dict[str, Tensor]  # published names
    classes: list[str] | None  # names in the order of the labels; None if the file has none
    config: str  # text of the configuration; empty if the file has none
    origin: dict[str, str] = field(default_factory=dict)  # file name, SHA-256 and version of MMDetection

    def mentions(self, pattern: str) -> bool:
        """Return whether the configuration or the name of the file matches a regular expression."""
        return re.search(pattern, self.config) is not None or re.search(pattern, self.path.name) is not None


def read_checkpoint(path: Path | str, *, ema: bool = False) -> Checkpoint:
    """Read a checkpoint of MMDetection 2 or 3. WeightsError says in one line why a file cannot be read.

    A run with an EMA saves the averaged weights under the plain names, because evaluation precedes saving. ``ema``
    takes the copies of mmcv (``ema_``) instead: those of a file that was saved in the middle of an epoch.
    """
    path = Path(path)
    if not path.is_file():
        got = "a folder" if path.is_dir() else "no such file"
        raise WeightsError(f"{path}: expected a checkpoint of MMDetection, got {got}; correct the path")
    if path.suffix == ".safetensors" and is_weights_file(path):
        raise WeightsError(f"{path}: is already a bucketrank model file; use it as it is")
    content = _load(path)
    content = content if isinstance(content, Mapping) else {}
    nested = content.get("state_dict", content.get("model", content))
    state = {
        key.removeprefix("module."): value
        for key, value in (nested.items() if isinstance(nested, Mapping) else ())
        if isinstance(key, str) and isinstance(value, Tensor)
    }
    if not state:
        raise WeightsError(f"{path}: expected a checkpoint with a state_dict, got none; choose a file of MMDetection")
    _require_plain_tensors(path, state)
    meta = content.get("meta")
    meta = meta if isinstance(meta, Mapping) else {}
    config = next((meta[key] for key in ("config", "cfg") if isinstance(meta.get(key), str)), "")
    versions = {key: str(meta[key])[:40] for key in ("mmdet_version", "mmcv_version") if key in meta}
    origin = {"file": path.name, "sha256": _sha256(path), **versions}
    return Checkpoint(path, _plain_names(path, state, ema=ema), _class_names(meta), config, origin)


def _require_plain_tensors(path: Path, state: Mapping[str, Tensor]) -> None:
    """Raise unless all tensors are dense and in memory, and small enough: a tiny file can describe a huge tensor."""
    for key, tensor in state.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise WeightsError(f"{path}: expected dense tensors, got another kind in {key!r:.80}; save the float model")
    count = sum(tensor.numel() for tensor in state.values())
    if count > MAX_NUMBERS:
        raise WeightsError(
            f"{path}: expected at most {MAX_NUMBERS:,} numbers, got {count:,}; the file is damaged or no detector"
        )


def _load(path: Path) -> Any:
    allowed: list[Any] = [(Inert, name) for name in INERT] + [(OrderedDict, name) for name in DICTIONARIES]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        if match is None:
            raise _damaged(path) from error
        raise WeightsError(
            f"{path}: expected tensors and plain values, got {match[1]}, which could run code and was not loaded; "
            'where it was made, keep only the weights: torch.save({"state_dict": checkpoint["state_dict"]}, FILE)'
        ) from error
    except MemoryError:
        raise
    # A damaged archive or pickle may raise any exception.
    except Exception as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> WeightsError:
    # Not torch's own message, which recommends loading the file with weights_only=False.
    return WeightsError(
        f"{path}: expected a checkpoint that torch.save wrote, got a truncated, damaged or other file; "
        "download it again"
    )


def _plain_names(path: Path, state: Mapping[str, Tensor], *, ema: bool) -> dict[str, Tensor]:
    plain = {key: tensor for key, tensor in state.items() if not key.startswith(EMA)}
    if not ema:
        return plain
    copies = {key: state.get(EMA + key.replace(".", "_")) for key in plain}
    if not any(copy is not None for copy in copies.values()):
        raise WeightsError(f"{path}: expected copies with the prefix {EMA}, got none; leave out --ema")
    # Counters of batch norms have no copy.
    return {key: plain[key] if (copy := copies[key]) is None else copy for key in plain}


def _class_names(meta: Mapping[Any, Any]) -> list[str] | None:
    """Return the class names of MMDetection 2 (CLASSES) or 3 (dataset_meta); None if there are none."""
    described = meta.get("dataset_meta")
    groups = [described, meta] if isinstance(described, Mapping) else [meta]
    for group in groups:
        for key in ("classes", "CLASSES"):
            names = group.get(key)
            if isinstance(names, str):  # a single class, or a tuple written as text
                names = _parsed(names)
            if isinstance(names, list | tuple) and names and all(map(is_text, names)):
                return list(names)[:MAX_NAMES]
    return None


def _parsed(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return [text]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
