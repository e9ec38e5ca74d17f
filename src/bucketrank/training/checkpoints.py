"""Checkpoints: everything a run needs to resume, as tensors and JSON in one safetensors file.

Pickles are never written or loaded. Each file holds its SHA-256. If the last file is damaged, the previous one is
used. Once the first checkpoint is written, the disk always holds a complete one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from bucketrank.errors import CheckpointError
from bucketrank.training.optimiser import Schedule
from bucketrank.weights.atomic import write_tensors
from bucketrank.weights.files import read_tensors

FORMAT = "1"


@dataclass
class Progress:
    """Position and results of a run: the numbers in a checkpoint."""

    epoch: int = 0  # completed epochs
    batch: int = 0  # batches of the current epoch that this process has trained on
    step: int = 0  # optimiser steps since the start of the run
    metrics: dict[str, float] = field(default_factory=dict)  # last evaluation; first process only
    threshold: float = 0.0
    best: float = -math.inf  # highest AP so far
    stale: int = 0  # evaluations since the highest AP
    seconds: float = 0.0  # time used, over all starts of the run
    planned: int | None = None  # steps that fit into trainer.max_time, once they are estimated
    out_of_time: bool = False  # whether trainer.max_time ended the run

    @classmethod
    def from_checkpoint(cls, state: Mapping[str, Any]) -> Progress:
        """Return the progress stored in a checkpoint."""
        return cls(**{each.name: state[each.name] for each in fields(cls) if each.name in state})

    def is_finished(self, schedule: Schedule) -> bool:
        """Return whether the last epoch is closed, after the last step by early stopping or for lack of time."""
        patience = schedule.settings.early_stop
        stopped_early = patience is not None and self.stale >= patience
        return self.batch == 0 and (stopped_early or self.out_of_time or self.step >= schedule.total_steps)


class Checkpoints:
    """The last checkpoint of a run and the previous one."""

    def __init__(self, folder: Path) -> None:
        self.last = folder / "last.safetensors"
        self.previous = folder / "previous.safetensors"
        self._complete: tuple[int, ...] | None = None  # inode, size and time of the last file, if complete

    def save(self, state: Mapping[str, Any]) -> None:
        """Write ``state``, which may hold numbers, strings, lists, dicts and tensors."""
        write_state(self.last, state, before_rename=self._keep_last)
        self._complete = _identity(self.last)

    def _keep_last(self) -> None:
        """Rename the last checkpoint to the previous one, unless it is damaged."""
        if not self.last.exists():
            return
        if self._complete is None or _identity(self.last) != self._complete:
            try:
                read_state(self.last)
            except CheckpointError:
                return
        # If the run is killed between this rename and the next, it resumes from the previous checkpoint.
        self.last.replace(self.previous)

    def load(self) -> tuple[dict[str, Any], Path] | None:
        """Return the newest complete state and its file, or None if none was written yet."""
        faults = []
        for path in filter(Path.exists, (self.last, self.previous)):
            try:
                return read_state(path), path
            except CheckpointError as error:  # noqa: PERF203 (two at most)
                faults.append(str(error))
        if faults:
            raise CheckpointError(
                f"{'; '.join(faults)}; restore one of these files, or start a new run with another --out"
            )
        return None


def _identity(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def write_state(path: Path, state: Mapping[str, Any], *, before_rename: Callable[[], object] = lambda: None) -> None:
    """Write ``state`` to a file, atomically; see :func:`bucketrank.weights.atomic.write`."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_packed(state, tensors))
    metadata = {"bucketrank-checkpoint": FORMAT, "tree": tree, "sha256": _digest(tree, tensors)}
    write_tensors(path, tensors, metadata, before_rename=before_rename)


def read_state(path: Path) -> dict[str, Any]:
    """Return the state in a file; raise CheckpointError unless it is a complete checkpoint."""
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        tensors, metadata = read_tensors(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a checkpoint ({error}); pickles are never loaded, even if renamed"
        ) from error
    if metadata.get("bucketrank-checkpoint") != FORMAT:
        raise CheckpointError(f"{path}: expected the checkpoint of a run, got another safetensors file")
    if metadata.get("sha256") != _digest(metadata.get("tree", ""), tensors):
        raise CheckpointError(f"{path}: damaged (its SHA-256 does not match)")
    state: dict[str, Any] = _unpacked(json.loads(metadata["tree"]), tensors)
    return state


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value as JSON with tagged dicts, tuples and tensors; collect the tensors in ``tensors``."""
    if isinstance(value, Tensor):
        name = f"{len(tensors):06d}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[key, _packed(each, tensors)] for key, each in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_packed(each, tensors) for each in value]}
    if isinstance(value, list):
        return [_packed(each, tensors) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"checkpoint: expected numbers, strings, lists, dicts and tensors, got {type(value).__name__}")


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(_unpacked(each, tensors) for each in value["tuple"])
    return {key: _unpacked(each, tensors) for key, each in value["dict"]}


def _digest(tree: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(tree.encode())
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {flat.dtype} {tuple(tensors[name].shape)}".encode())
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
