"""Fingerprint of a data set: classes, images and boxes, but no pixels. A resumed run compares it with its data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bucketrank.data.annotations import Split, classes, file_name, size_of
from bucketrank.data.problems import counted
from bucketrank.errors import ChangedDataError
from bucketrank.weights.atomic import write_tensors

FORMAT = "1"
SHOWN = 10  # upper bound on the classes in a message


@dataclass(frozen=True)
class Fingerprint:
    """The classes of a data set, and a digest for each image and annotation.

    ``rows`` holds (n, 2) tensors of ids and digests under ``train.images``, ``train.annotations``, ``val.images`` and
    ``val.annotations``. They keep the order in the files, on which the order of training depends.
    """

    classes: tuple[tuple[int, str], ...]
    rows: dict[str, Tensor]

    def write(self, path: Path) -> None:
        """Write the fingerprint as a safetensors file."""
        write_tensors(path, self.rows, {"bucketrank-data": FORMAT, "classes": json.dumps(self.classes)})

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
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if metadata.get("bucketrank-data") != FORMAT:
            return None
        pairs = tuple((int(number), str(name)) for number, name in json.loads(metadata["classes"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None
    keys = {f"{split}.{noun}" for split in ("train", "val") for noun in ("images", "annotations")}
    sound = {*rows} == keys and all(tensor.shape[1:] == (2,) for tensor in rows.values())
    return Fingerprint(pairs, rows) if sound else None


def require_same_data(folder: Path, before: Fingerprint, now: Fingerprint, *, allow_changes: bool) -> None:
    """Raise ChangedDataError if the classes changed, or, without ``allow_changes``, images or annotations.

    Changed classes are never allowed, because the weights belong to the old ones.
    """
    if before.classes != now.classes:
        raise ChangedDataError(
            f"{folder}: the classes changed since the run began, from {_listed(before.classes)} to "
            f"{_listed(now.classes)}; restore the data, or start a new run (--init takes the weights of this one)"
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


def _listed(pairs: Iterable[tuple[int, str]]) -> str:
    texts = [f"{name} ({number})" for number, name in pairs]
    return ", ".join(texts[:SHOWN]) + (f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else "")
