"""Weights in one safetensors file that knows what it is: recipe, classes and threshold are in its metadata.

Nothing is ever unpickled: a file that is not safetensors is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bucketrank.detectors import Detector, build
from bucketrank.training.atomic import write_tensors
from bucketrank.training.recipe import Recipe, from_dict

FORMAT = "1"


class WeightsError(ValueError):
    """The file holds no weights of ours; the message says what it is instead."""


@dataclass(frozen=True)
class Meta:
    """What a weights file says about itself.

    ``threshold`` is the score from which on detections are shown: that of the best F1 on the validation set, and 0
    where none could be chosen. Scores of a ranking loss are ranks, not probabilities, so that 0.5 would mean nothing.
    """

    classes: list[str]  # of label 1, 2, ...
    category_ids: list[int]  # in the annotations, of the same labels
    threshold: float
    recipe: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)  # on the validation set
    versions: dict[str, str] = field(default_factory=dict)


def save_weights(path: Path | str, model: Detector | Mapping[str, Tensor], meta: Meta) -> None:
    """Write the tensors of a model, or of its state, with what is known about them; never half a file."""
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
    write_tensors(Path(path), dict(state), metadata)


def read_weights(path: Path | str) -> tuple[dict[str, Tensor], Meta]:
    """The tensors and what the file says about them; WeightsError if it is no such file."""
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
        meta = Meta(
            classes=[str(name) for name in json.loads(metadata["classes"])],
            category_ids=[int(number) for number in json.loads(metadata["category_ids"])],
            threshold=float(metadata["threshold"]),
            recipe=dict(json.loads(metadata["recipe"])),
            metrics={name: float(value) for name, value in json.loads(metadata.get("metrics", "{}")).items()},
            versions=dict(json.loads(metadata.get("versions", "{}"))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{path}: the description inside cannot be read ({error!r})") from error
    return state, meta


def load_model(path: Path | str) -> tuple[Detector, Meta]:
    """The detector of a weights file, in evaluation mode on the CPU, and what the file says about it."""
    state, meta = read_weights(path)
    recipe = from_dict(meta.recipe, source=str(path))
    model = build_detector(without_weights(recipe), num_classes=len(meta.classes))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = " ".join(str(error).split())
        raise WeightsError(f"{path}: the tensors do not fit the recipe inside: {lines:.400}") from error
    return model.eval(), meta


def build_detector(recipe: Recipe, *, num_classes: int) -> Detector:
    """The detector of a recipe."""
    own = {key: value for key, value in recipe.detector.items() if key != "name"}
    return build(
        recipe.detector["name"],
        num_classes=num_classes,
        backbone=recipe.backbone,
        loss=recipe.loss,
        inputs=recipe.inputs,
        **own,
    )


def without_weights(recipe: Recipe) -> Recipe:
    """The same detector, but its backbone's weights are not read: they come from elsewhere.

    Whether there are any decides what is frozen, so that is written down first.
    """
    backbone = recipe.backbone
    if backbone.weights is not None:
        backbone = replace(
            backbone,
            weights=None,
            frozen_stages=1 if backbone.frozen_stages is None else backbone.frozen_stages,
            batch_norm="frozen" if backbone.batch_norm == "auto" else backbone.batch_norm,
        )
    return replace(recipe, backbone=backbone)
