"""Weights files: find, read and write safetensors with recipe, classes and threshold in the metadata.

Pickles are never loaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bucketrank.data.annotations import is_id, is_text
from bucketrank.data.problems import counted
from bucketrank.errors import WeightsError
from bucketrank.evaluation.calibration.mapping import Calibration
from bucketrank.weights.atomic import require_writable, write_tensors

FORMAT = "1"
RUN_FILE = "weights.safetensors"  # file name in a run folder
HUB_FILE = "model.safetensors"  # file name in a save_pretrained folder and in a hub repository
CONFIG_FILE = "config.json"  # a copy of the description for readers
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
MEANINGS = {"match": "the probability of a match at IoU 0.5", "iou": "the expected IoU"}


@dataclass(frozen=True)
class Meta:
    """The description inside a weights file.

    ``threshold`` is the minimum score to report: the best-F1 score on the validation set, or 0 if none could be chosen.
    ``images`` counts the images of the run, ``train`` and ``val``. ``calibration`` is the map from the trained logits
    to probabilities, already folded into the tensors. None means uncalibrated scores. For a ranking loss these are
    ranks, so 0.5 has no meaning.
    """

    classes: list[str]  # names of label 1, 2, ...
    category_ids: list[int]  # annotation ids of the same labels
    threshold: float  # minimum score to report
    recipe: dict[str, Any]  # settings of the run, in groups
    metrics: dict[str, float] = field(default_factory=dict)  # metrics on the validation set
    versions: dict[str, str] = field(default_factory=dict)  # versions of the packages that trained it
    calibration: Calibration | None = None  # None if the scores are not calibrated
    images: dict[str, int] = field(default_factory=dict)  # number of images, train and val
    origin: dict[str, str] = field(default_factory=dict)  # file name and SHA-256 of a converted checkpoint

    def calibrated(self, calibration: Calibration) -> Meta:
        """Update the threshold, the recipe's minimum score and the errors after a calibration."""
        detector = dict(self.recipe.get("detector", {}))
        if detector.get("score_threshold") and calibration.method == "platt":
            detector["score_threshold"] = calibration.score_map.threshold(float(detector["score_threshold"]))
        errors = {"calibration/D-ECE before": calibration.d_ece[0], "calibration/D-ECE after": calibration.d_ece[1]}
        return replace(
            self,
            threshold=calibration.threshold(self.threshold),
            recipe={**self.recipe, "detector": detector},
            metrics=self.metrics | errors,
            calibration=calibration.after(self.calibration),
        )


def save_weights(path: Path | str, model: torch.nn.Module | Mapping[str, Tensor], meta: Meta) -> None:
    """Write the tensors of ``model``, a module or its state, and their description ``meta`` to ``path``, atomically."""
    state = model.state_dict() if isinstance(model, torch.nn.Module) else model
    metadata = {
        "bucketrank": FORMAT,
        "classes": json.dumps(meta.classes),
        "category_ids": json.dumps(meta.category_ids),
        "threshold": repr(meta.threshold),
        "recipe": json.dumps(meta.recipe),
        "metrics": json.dumps({name: repr(value) for name, value in meta.metrics.items()}),
        "versions": json.dumps(meta.versions),
    }
    metadata |= {name: json.dumps(each) for name in ("images", "origin") if (each := getattr(meta, name))}
    if meta.calibration is not None:
        metadata["calibration"] = json.dumps(meta.calibration.to_dict())
    write_tensors(Path(path), dict(state), metadata)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file; raise SafetensorError or OSError if it is not one."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 (not a dict)


def is_weights_file(path: Path) -> bool:
    """Return whether a file holds bucketrank weights, from its header."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("bucketrank") == FORMAT
    except (SafetensorError, OSError):
        return False


def require_replaceable(path: Path, name: str) -> None:
    """Raise an error if the output file ``path`` is a folder, or exists and holds no bucketrank weights.

    For a folder, the message suggests the file ``name`` in it.
    """
    require_writable(path, name)
    if os.path.lexists(path) and not is_weights_file(path):
        raise WeightsError(f"{path}: expected a new file or bucketrank weights, got another file; choose another --out")


def read_weights(path: Path | str) -> tuple[dict[str, Tensor], Meta]:
    """Read the tensors and the description of the weights file ``path``; raise WeightsError if it is not one."""
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"{path}: the file does not exist; training writes weights.safetensors into its run folder")
    try:
        state, metadata = read_tensors(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path}: not a safetensors file, or an incomplete one ({error}); copy it again; pickles are never loaded, "
            f"even if renamed; convert an MMDetection checkpoint with: bucketrank convert-weights {path}"
        ) from error
    if metadata.get("bucketrank") != FORMAT:
        raise WeightsError(
            f"{path}: not bucketrank weights (no recipe and classes inside); pass backbone weights with "
            "--backbone.weights"
        )
    try:
        return state, _described(metadata)
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise WeightsError(f"{path}: the description inside cannot be read ({error!r:.200})") from error


def _described(metadata: Mapping[str, str]) -> Meta:
    classes, numbers = json.loads(metadata["classes"]), json.loads(metadata["category_ids"])
    if not isinstance(classes, list) or not classes or not all(map(is_text, classes)):
        raise ValueError("expected classes to be a list of names")
    if not isinstance(numbers, list) or not all(map(is_id, numbers)) or len({*numbers}) != len(classes):
        raise ValueError("expected category_ids to be as many different whole numbers as there are classes")
    groups = [json.loads(metadata.get(name, "{}")) for name in ("recipe", "metrics", "versions", "images", "origin")]
    if not all(isinstance(each, dict) for each in groups):
        raise TypeError("expected recipe, metrics, versions, images and origin to be names with values")
    recipe, metrics, versions, images, origin = groups
    if not all(isinstance(number, int) for number in images.values()):
        raise TypeError("expected images to be whole numbers")
    threshold = float(metadata["threshold"])
    if not 0 <= threshold <= 1:  # also refuses NaN, with which nothing would be reported
        raise ValueError(f"expected threshold to be a score from 0 to 1, got {threshold}")
    calibration = json.loads(metadata["calibration"]) if "calibration" in metadata else None
    return Meta(
        classes=classes,
        category_ids=numbers,
        threshold=threshold,
        recipe=recipe,
        metrics={name: float(value) for name, value in metrics.items()},
        versions=versions,
        calibration=None if calibration is None else Calibration.from_dict(calibration),
        images=images,
        origin={name: str(value) for name, value in origin.items()},
    )


def find_weights(source: Path | str, **download: Any) -> Path:
    """Find the weights file that ``source`` names; download it if it is on the hub.

    ``source`` is a weights file, a run folder, a ``save_pretrained`` folder, or a hub repository like ``"owner/name"``.
    An existing file or folder of that name takes precedence. ``download`` are further arguments of
    ``huggingface_hub.hf_hub_download``, like ``revision``.
    """
    path = Path(source)
    if path.is_dir():
        for name in (HUB_FILE, RUN_FILE):
            if (path / name).is_file():
                return path / name
        others = ", ".join(str(each) for each in sorted(path.glob("*.safetensors")) if each.name != "data.safetensors")
        raise WeightsError(
            f"{path}: expected {RUN_FILE} of a run or {HUB_FILE} of save_pretrained in the folder, got neither; "
            f"choose the folder of a finished run, or a weights file{f' ({others})' if others else ''}"
        )
    if not path.is_file() and is_repository(source):
        return _download(path.as_posix(), **download)
    return path


def is_repository(source: Path | str) -> bool:
    """Return whether ``source`` has the form of a hub repository, like ``"owner/name"``.

    >>> is_repository("owner/name"), is_repository("runs/first/best.safetensors"), is_repository("a/b.safetensors")
    (True, False, False)
    """
    name = Path(source).as_posix()
    return REPOSITORY.fullmatch(name) is not None and not name.endswith(".safetensors")


def _download(repository: str, **download: Any) -> Path:
    """Get a repository's weights file from the hub or its cache; errors say what was expected and what to do."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    from bucketrank.weights.sources import hub_access

    host = urlsplit(constants.ENDPOINT).hostname
    expected = f"{repository}: expected a file, a folder or a repository on {host}"
    with hub_access(f"{expected}; no such file exists, and a repository", "check the name and the connection"):
        try:
            with suppress(EntryNotFoundError):
                hf_hub_download(repository, CONFIG_FILE, **download)
            return Path(hf_hub_download(repository, HUB_FILE, **download))
        except RemoteEntryNotFoundError as error:
            raise WeightsError(
                f"{repository}: expected {HUB_FILE} in the repository on {host}, got none; choose a repository that "
                "push_to_hub of a bucketrank detector wrote (pickles are never loaded)"
            ) from error
        except RevisionNotFoundError as error:
            text = f"{repository}: expected a branch, tag or commit of the repository on {host}, got none of that name"
            raise WeightsError(f"{text}; choose another revision") from error
        except GatedRepoError as error:
            raise WeightsError(
                f"{repository}: expected access to the repository on {host}, got none; ask for access on its page, "
                "then log in with: hf auth login"
            ) from error
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise WeightsError(
                f"{expected}, got none of that name; check the name, and log in with hf auth login if the repository "
                "is private"
            ) from error


def describe_scores(meta: Meta) -> str:
    """Say in one sentence what the scores were calibrated to, or that they were not calibrated."""
    if meta.calibration is None:
        return "Scores are not calibrated: bucketrank calibrate makes them probabilities."
    calibration = meta.calibration
    name, errors = ("D-ECE", calibration.d_ece) if calibration.target == "match" else ("LaECE", calibration.la_ece)
    return (
        f"Scores are calibrated to {MEANINGS[calibration.target]}, on {counted(calibration.images, 'image')}: the "
        f"calibration error ({name}) was {errors[0]:.3f} before and is {errors[1]:.3f} now."
    )
