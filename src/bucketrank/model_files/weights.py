"""Weights files: safetensors with recipe, classes and threshold in the metadata. Pickles are never read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bucketrank.calibration.calibration_result import Calibration
from bucketrank.data.annotations import is_text, usable_id
from bucketrank.data.problems import DataError
from bucketrank.model_files.atomic import write_tensors

FORMAT = "1"


class WeightsError(DataError):
    """Not a weights file of a bucketrank run, or a damaged one; the message says which."""


@dataclass(frozen=True)
class Meta:
    """The description inside a weights file.

    ``threshold`` is the minimum score to report: the one with the best F1 on the validation set, or 0 if none could be
    chosen. ``images`` are the numbers of images that the run used, ``train`` and ``val``; files of earlier versions
    have none. ``calibration`` is the map from the trained logits to probabilities, which the tensors already hold. None
    means that the scores are those of the loss. Those of a ranking loss are ranks, so that 0.5 means nothing.
    """

    classes: list[str]  # names of label 1, 2, ...
    category_ids: list[int]  # ids of the same labels in the annotations
    threshold: float  # minimum score to report
    recipe: dict[str, Any]  # the settings of the run, as groups
    metrics: dict[str, float] = field(default_factory=dict)  # metrics on the validation set
    versions: dict[str, str] = field(default_factory=dict)  # versions of the packages that trained it
    calibration: Calibration | None = None  # None if the scores are those of the loss
    images: dict[str, int] = field(default_factory=dict)  # numbers of images, train and val

    def calibrated(self, calibration: Calibration) -> Meta:
        """Return the description after a calibration: threshold, minimum score of the recipe and errors are its own."""
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
    """Write the tensors of a model or of its state with their description, atomically.

    Args:
        path: the file to write.
        model: a model, or its state.
        meta: the description.
    """
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
    if meta.images:
        metadata["images"] = json.dumps(meta.images)
    if meta.calibration is not None:
        metadata["calibration"] = json.dumps(meta.calibration.to_dict())
    write_tensors(Path(path), dict(state), metadata)


def read_weights(path: Path | str) -> tuple[dict[str, Tensor], Meta]:
    """Return the tensors and the description of a weights file; WeightsError if it is not one.

    Args:
        path: the weights file.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"{path}: there is no such file; training writes weights.safetensors into its run folder")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path}: not a safetensors file ({error}); pickles are not read, whatever their name"
        ) from error
    if metadata.get("bucketrank") != FORMAT:
        raise WeightsError(
            f"{path}: not weights of a bucketrank run (no recipe and classes inside); "
            "weights of a backbone are given by --backbone.weights"
        )
    try:
        return state, _described(metadata)
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise WeightsError(f"{path}: the description inside cannot be read ({error!r:.200})") from error


def _described(metadata: Mapping[str, str]) -> Meta:
    classes, numbers = json.loads(metadata["classes"]), json.loads(metadata["category_ids"])
    if not isinstance(classes, list) or not classes or not all(map(is_text, classes)):
        raise ValueError("expected classes to be a list of names")
    if not isinstance(numbers, list) or not all(map(usable_id, numbers)) or len({*numbers}) != len(classes):
        raise ValueError("expected category_ids to be as many different whole numbers as there are classes")
    groups = [json.loads(metadata.get(name, "{}")) for name in ("recipe", "metrics", "versions", "images")]
    if not all(isinstance(each, dict) for each in groups):
        raise TypeError("expected recipe, metrics, versions and images to be names with values")
    recipe, metrics, versions, images = groups
    if not all(isinstance(number, int) for number in images.values()):
        raise TypeError("expected images to be whole numbers")
    threshold = float(metadata["threshold"])
    if not 0 <= threshold <= 1:  # NaN, too, under which nothing would be reported
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
    )
