"""Atomic writes: a file is complete or does not exist, even if the process is killed.

Safetensors files get reproducible bytes. The safetensors library writes the metadata in random order and ignores the
umask: only the owner could read its files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from bucketrank.errors import DataError, DiskFullError

T = TypeVar("T")

TEMPORARY = re.compile(r"\.(?P<name>.+)\.\d+")  # a file name between a dot and the process id
MAX_NAME_BYTES = 255  # the limit of all common file systems
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
ALIGNMENT = 8  # bytes; alignment of the first tensor
DTYPES = {  # dtype names of the format; tensors with larger elements come first, which keeps every tensor aligned
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    before_rename: Callable[[], object] = lambda: None,
) -> None:
    """Write a safetensors file, sorted by name; tensors that share memory are written separately."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{path}: expected {name} to have a safetensors dtype, got {tensor.dtype}")
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        header[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(text)))
            file.write(text)
            for name in names:
                flat = tensors[name].detach().cpu().contiguous().reshape(-1)
                if flat.numel():
                    file.write(flat.view(torch.uint8).numpy().data)

    write(path, save, before_rename=before_rename)


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def require_writable(path: Path, name: str) -> None:
    """Raise DataError if the output file ``path`` is a folder, or if its folder is read-only or a file.

    For a folder, the message suggests the file ``name`` in it.
    """
    if path.is_dir():
        raise DataError(f"{path}: expected a file to write, got a folder; give a file such as {path / name}")
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    reason = "is a file" if existing.is_file() else "is read-only"
    if existing.is_file() or not os.access(existing, os.W_OK):  # said before the work, not after it
        raise DataError(f"{path}: cannot be written, because {existing} {reason}; choose another place")


def require_no_input(path: Path, inputs: Iterable[Path | str | None]) -> None:
    """Raise DataError if the output file ``path`` is one of the files that the command reads."""
    for each in inputs:
        if each is not None and path.exists() and Path(each).exists() and path.samefile(each):
            raise DataError(f"{path}: expected a new file to write, got an input of the command; choose another --out")


def write(path: Path, save: Callable[[Path], T], *, before_rename: Callable[[], object] = lambda: None) -> T:
    """Write to a temporary file in the same folder, flush it to the disk, then rename it; return what ``save`` returns.

    ``before_rename`` is called once the new file is complete, while the old one still exists.
    """
    process = f".{os.getpid()}"
    # A name near the length limit is shortened.
    temporary = path.with_name(f".{shortened(path.name, MAX_NAME_BYTES - 1 - len(process))}{process}")
    with disk_full_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            result = save(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            before_rename()
            temporary.replace(path)
            sync_folder(path.parent)
            return result
        finally:
            temporary.unlink(missing_ok=True)


def shortened(name: str, size: int) -> str:
    """Cut a file name to at most ``size`` bytes."""
    return os.fsencode(name)[:size].decode("utf-8", "ignore") if len(os.fsencode(name)) > size else name


@contextmanager
def disk_full_named(path: Path) -> Iterator[None]:
    """Let errors of writing name the file, not the temporary one; say what to do if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            if error.filename is not None:
                error.filename = str(path)
            raise
        raise DiskFullError(f"{path}: cannot be written, the disk or the quota is full; free some space") from error


def remove_temporary_files(folder: Path, is_ours: Callable[[str], bool]) -> int:
    """Remove temporary files that killed processes left, if ``is_ours`` accepts the file name; return the freed bytes.

    No other process may write to the folder at the same time.
    """
    freed = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        match = TEMPORARY.fullmatch(path.name)
        if path.is_file() and match is not None and is_ours(match["name"]):
            freed += path.lstat().st_size
            path.unlink()
    return freed


def sync_folder(folder: Path) -> None:
    """Flush renames in a folder to the disk, if the system supports it."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
