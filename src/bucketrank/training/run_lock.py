"""The run folder while a process works in it: locked, without leftovers of killed runs, without files of others."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from bucketrank.errors import RunFolderError
from bucketrank.weights.atomic import remove_temporary_files

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


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Create the folder, lock it, and remove what killed runs left; RunFolderError if another process works in it.

    The system releases the lock when the process ends, in whatever way. If nothing was written at the end, the folder
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
            "%s: the file system has no locks; a second run into this folder is not noticed", folder
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
    """Raise RunFolderError if a folder without a run holds files that a run would overwrite."""
    checkpoints = [folder / "checkpoints" / name for name in CHECKPOINTS]
    if (folder / "recipe.yaml").exists() or (resume and any(path.exists() for path in checkpoints)):
        return
    foreign = [name for name in (*RUN_FILES, *RUN_FOLDERS) if os.path.lexists(folder / name)]
    if foreign:
        raise RunFolderError(
            f"{folder}: there is no run (no recipe.yaml), but there are files that a run would overwrite: "
            f"{', '.join(foreign)}; choose another --out, or move them away"
        )


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
