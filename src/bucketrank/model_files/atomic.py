"""Atomic writing: a file exists complete or not at all, whenever the process is killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; tensors that share memory are written separately."""
    state = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    write(path, lambda temporary: save_file(state, temporary, metadata=dict(metadata)))


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Write to a temporary file in the same folder, flush it to the disk, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush renames in a folder to the disk, where the system supports it."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
