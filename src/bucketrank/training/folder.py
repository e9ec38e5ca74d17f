"""The run folder: lock it, clean up after killed runs, refuse foreign files, describe the run, and notice changed data.

The fingerprint of a data set covers classes, images and boxes, but no pixels. A resumed run compares it with its data.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor

from bucketrank.data.annotations import Split, classes, file_name, size_of
from bucketrank.data.problems import counted, listed
from bucketrank.errors import ChangedDataError, RunFolderError
from bucketrank.provenance import describe
from bucketrank.settings import Recipe, recipe_to_yaml
from bucketrank.weights.atomic import remove_temporary_files, write_tensors, write_text
from bucketrank.weights.files import read_tensors

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
RUN_FOLDERS = ("checkpoints", "pictures", "detections", "tensorboard", "wandb", "mlflow", "csv")
CHECKPOINTS = ("last.safetensors", "previous.safetensors")
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
PACKAGES = ("bucketrank", "torch", "torchvision", "lightning", "timm", "transformers", "numba", "numpy", "safetensors")
FINGERPRINT_FORMAT = "1"
SHOWN = 10  # upper bound on the classes in a message


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Create and lock the folder, and clean up after killed runs; raise RunFolderError if another process uses it.

    The operating system releases the lock when the process ends or is killed. If no run was started in the folder, it
    is removed again.
    """
    if folder.is_file():
        raise RunFolderError(f"{folder}: expected a folder for the run, got a file; choose another --out")
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


@dataclass(frozen=True)
class Fingerprint:
    """The classes of a data set, and a digest for each image and annotation.

    ``rows`` holds (n, 2) tensors of ids and digests under ``train.images``, ``train.annotations``, ``val.images`` and
    ``val.annotations``. They keep the order in the files, on which the order of training depends.
    """

    classes: tuple[tuple[int, str], ...]
    rows: dict[str, Tensor]

    @property
    def listed_classes(self) -> str:
        """The class names with their ids, for a message."""
        return listed([f"{name} ({number})" for number, name in self.classes], SHOWN)

    def write(self, path: Path) -> None:
        """Write the fingerprint as a safetensors file."""
        write_tensors(path, self.rows, {"bucketrank-data": FINGERPRINT_FORMAT, "classes": json.dumps(self.classes)})

    def changes(self, now: Fingerprint) -> list[str]:
        """Describe changed images and annotations, in one string per split."""
        texts = []
        for split in ("train", "val"):
            parts = [
                text
                for noun in ("image", "annotation")
                for text in _changes(self.rows[f"{split}.{noun}s"], now.rows[f"{split}.{noun}s"], noun)
            ]
            texts += [f"{split}: {', '.join(parts)}"] if parts else []
        return texts


def fingerprint_of(train: Split, val: Split, *, masks: bool) -> Fingerprint:
    """Compute the fingerprint of two splits; ``masks`` includes the segmentations."""
    rows = {}
    names: list[tuple[int, str]] = []
    for name, split in (("train", train), ("val", val)):
        document = split.read()
        names = names or list(classes(document))
        rows[f"{name}.images"] = _digests(
            (image["id"], [file_name(image), *size_of(image)]) for image in document["images"]
        )
        rows[f"{name}.annotations"] = _digests(
            (entry.get("id"), _described(entry, masks=masks)) for entry in document["annotations"]
        )
    return Fingerprint(tuple(names), rows)


def read_fingerprint(path: Path) -> Fingerprint | None:
    """Read a fingerprint, or return None if the file is missing or damaged."""
    if not path.is_file():
        return None
    try:
        rows, metadata = read_tensors(path)
        if metadata.get("bucketrank-data") != FINGERPRINT_FORMAT:
            return None
        pairs = tuple((int(number), str(name)) for number, name in json.loads(metadata["classes"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None
    keys = {f"{split}.{noun}" for split in ("train", "val") for noun in ("images", "annotations")}
    sound = {*rows} == keys and all(tensor.shape[1:] == (2,) for tensor in rows.values())
    return Fingerprint(pairs, rows) if sound else None


def require_same_data(folder: Path, now: Fingerprint, *, allow_changes: bool) -> None:
    """Raise ChangedDataError if the classes changed, or, without ``allow_changes``, images or annotations.

    Changed classes are never allowed, because the weights belong to the old ones. A run whose fingerprint is missing
    or damaged continues with ``allow_changes`` only.
    """
    path = folder / "data.safetensors"
    before = read_fingerprint(path)
    if before is None:
        if not path.exists() and not (folder / "checkpoints").is_dir():
            return
        if not allow_changes:
            raise ChangedDataError(
                f"{path}: expected the fingerprint of the data, got a missing or damaged file; restore it, or pass "
                "--allow-changed-data to continue with the data as it is now"
            )
        logging.getLogger(__name__).warning("%s: missing or damaged; the data was not checked for changes", path)
        return
    if before.classes != now.classes:
        raise ChangedDataError(
            f"{folder}: the classes changed since the run began, from {before.listed_classes} to "
            f"{now.listed_classes}; restore the data, or start a new run (--init takes the weights of this one)"
        )
    changes = before.changes(now)
    if changes and not allow_changes:
        raise ChangedDataError(
            f"{folder}: the data changed since the run began ({'; '.join(changes)}); restore the data, or pass "
            "--allow-changed-data to continue with the data as it is now"
        )


def _described(entry: dict[str, Any], *, masks: bool) -> list[Any]:
    described = [entry["image_id"], entry["category_id"], entry["bbox"], entry.get("iscrowd", 0), entry.get("area")]
    return [*described, entry.get("segmentation")] if masks else described


def _digests(items: Iterable[tuple[Any, list[Any]]]) -> Tensor:
    """Return ids and 8-byte digests; an entry without a usable id gets its negated position as id."""
    rows = []
    for place, (number, content) in enumerate(items, start=1):
        digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=8).digest()
        usable = isinstance(number, int) and abs(number) < 2**63
        rows.append((number if usable else -place, int.from_bytes(digest, "big", signed=True)))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)


def _changes(before: Tensor, now: Tensor, noun: str) -> list[str]:
    if torch.equal(before, now):
        return []
    old, new = (dict(rows.tolist()) for rows in (before, now))
    counts = {
        "added": len(new.keys() - old.keys()),
        "removed": len(old.keys() - new.keys()),
        "changed": sum(old[number] != new[number] for number in old.keys() & new.keys()),
    }
    texts = [f"{counted(count, noun)} {what}" for what, count in counts.items() if count]
    return texts or [f"{noun}s in another order"]
