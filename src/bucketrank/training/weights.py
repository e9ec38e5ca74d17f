"""Weights in one safetensors file that knows what it is: recipe, classes and threshold are in its metadata.

Nothing is ever unpickled: a file that is not safetensors is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from bucketrank.data.annotations import is_text, usable_id
from bucketrank.detectors import Detector, build
from bucketrank.training.atomic import write_tensors
from bucketrank.training.recipe import Recipe, RecipeError, from_dict

FORMAT = "1"
SPARE = 2**26  # elements that building may take beyond the file's: a classifier that is dropped again


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
        return state, _described(metadata)
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise WeightsError(f"{path}: the description inside cannot be read ({error!r:.200})") from error


def _described(metadata: Mapping[str, str]) -> Meta:
    classes, numbers = json.loads(metadata["classes"]), json.loads(metadata["category_ids"])
    if not isinstance(classes, list) or not classes or not all(map(is_text, classes)):
        raise ValueError("expected classes to be a list of names")
    if not isinstance(numbers, list) or not all(map(usable_id, numbers)) or len({*numbers}) != len(classes):
        raise ValueError("expected category_ids to be as many different whole numbers as there are classes")
    recipe, metrics, versions = (json.loads(metadata.get(name, "{}")) for name in ("recipe", "metrics", "versions"))
    if not all(isinstance(each, dict) for each in (recipe, metrics, versions)):
        raise TypeError("expected recipe, metrics and versions to be names with values")
    return Meta(
        classes=classes,
        category_ids=numbers,
        threshold=float(metadata["threshold"]),
        recipe=recipe,
        metrics={name: float(value) for name, value in metrics.items()},
        versions=versions,
    )


def load_model(path: Path | str) -> tuple[Detector, Meta]:
    """The detector of a weights file, in evaluation mode on the CPU, and what the file says about it."""
    state, meta = read_weights(path)
    broken = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise WeightsError(f"{path}: {broken[0]} holds NaN or infinity; the training diverged, or the file is damaged")
    try:
        recipe = from_dict(meta.recipe, source=str(path))
        with _no_more_than(4 * sum(tensor.numel() for tensor in state.values()) + SPARE):
            model = build_detector(without_weights(recipe), num_classes=len(meta.classes))
    except RecipeError as error:
        raise WeightsError(str(error)) from error
    # Whatever the parts of a detector and those of timm and transformers say to settings that cannot be.
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise WeightsError(f"{path}: the recipe inside makes no detector: {_first_line(error)}") from error
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = " ".join(str(error).split())
        raise WeightsError(f"{path}: the tensors do not fit the recipe inside: {lines:.400}") from error
    model.stored_threshold = meta.threshold
    return model.eval(), meta


@contextmanager
def _no_more_than(elements: int) -> Iterator[None]:
    """Raise before more than so many elements of parameters are filled: a recipe of a few bytes may ask for any."""
    left = elements

    def count(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal left
        left -= 0 if parameter is None else parameter.numel()
        if left < 0:
            raise ValueError("it has many more parameters than the file")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _first_line(error: Exception) -> str:
    return f"{(str(error).splitlines() or [repr(error)])[0]:.200}"


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
