"""The run folder: lock it, clean up after killed runs, refuse foreign files, and describe the run in it."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from bucketrank.errors import RunFolderError
from bucketrank.provenance import describe
from bucketrank.settings import Recipe, recipe_to_yaml
from bucketrank.training.fingerprint import Fingerprint
from bucketrank.weights.atomic import remove_temporary_files, write_text

LOCK = ".bucketrank.lock"
RUN_FILES = (
    "recipe.yaml",
    "environment.json",
    "data.safetensors",
    "train.csv",
    "validation.csv",
    "curves.png",
    "best.safetensors",
    "weights.safetensors",
)
RUN_FOLDERS = ("checkpoints", "pictures", "detections", "tensorboard", "wandb", "mlruns", "csv")
CHECKPOINTS = ("last.safetensors", "previous.safetensors")
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
PACKAGES = ("bucketrank", "torch", "torchvision", "lightning", "timm", "transformers", "numba", "numpy", "safetensors")


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Create and lock the folder, and clean up after killed runs; raise RunFolderError if another process uses it.

    The operating system releases the lock when the process ends or is killed. If no run was started in the folder, it
    is removed again.
    """
    created = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunFolderError(
            f"{folder}: another run works in this folder ({_holder(folder)}); wait for its end or choose another --out"
        ) from error
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in WITHOUT_LOCKS:
            raise
        logging.getLogger(__name__).warning(
            "%s: the file system has no locks; a second run into this folder will not be noticed", folder
        )
    try:
        with suppress(OSError):
            (folder / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        _remove_leftovers(folder)
        yield
    finally:
        if not (folder / "recipe.yaml").exists():
            with suppress(OSError):
                (folder / LOCK).unlink()
                for each in created:
                    each.rmdir()  # fails if it is not empty
        lock.release()


def require_no_foreign_files(folder: Path, *, resume: bool) -> None:
    """Raise RunFolderError if a run would overwrite files that no run wrote."""
    checkpoints = [folder / "checkpoints" / name for name in CHECKPOINTS]
    if (folder / "recipe.yaml").exists() or (resume and any(path.exists() for path in checkpoints)):
        return
    foreign = [name for name in (*RUN_FILES, *RUN_FOLDERS) if os.path.lexists(folder / name)]
    if foreign:
        raise RunFolderError(
            f"{folder}: there is no run (no recipe.yaml), but there are files that a run would overwrite: "
            f"{', '.join(foreign)}; choose another --out, or move them away"
        )


def describe_run(folder: Path, recipe: Recipe, data: Path | str, fingerprint: Fingerprint) -> None:
    """Write the recipe, the data folder and its fingerprint and, at the first start, the command and the machine.

    The recipe comes first: with it, the folder holds a run that can be resumed if it is killed before the next file.
    """
    write_text(folder / "recipe.yaml", recipe_to_yaml(recipe))
    environment, place = folder / "environment.json", str(Path(data).absolute())
    before = _read_environment(environment)
    if before is None or before.get("data") != place:  # the data may have been moved
        machine = describe("cuda" if torch.cuda.is_available() else "cpu", packages=PACKAGES)
        about = before or {"command": sys.argv, "data": place, **machine}
        write_text(environment, json.dumps({**about, "data": place}, indent=2) + "\n")
    fingerprint.write(folder / "data.safetensors")


def stored_data_folder(folder: Path) -> Path | None:
    """Return the data folder of the run, or None if environment.json is missing or damaged."""
    stored = (_read_environment(folder / "environment.json") or {}).get("data")
    return Path(stored) if isinstance(stored, str) else None


def _read_environment(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _remove_leftovers(folder: Path) -> None:
    freed = remove_temporary_files(folder, lambda name: name in RUN_FILES)
    freed += remove_temporary_files(folder / "checkpoints", lambda name: name in CHECKPOINTS)
    freed += remove_temporary_files(folder / "pictures", lambda name: re.fullmatch(r"\d+\.jpg", name) is not None)
    if freed:
        logging.getLogger(__name__).info("%s: removed %d bytes of unfinished files", folder, freed)


def _holder(folder: Path) -> str:
    try:
        return (folder / LOCK).read_text(encoding="utf-8").strip()[:200] or "unknown process"
    except (OSError, UnicodeDecodeError):
        return "unknown process"
