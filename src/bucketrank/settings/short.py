"""Short names of the settings that people change most often, as other detection tools call them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bucketrank.errors import UsageError, short_repr
from bucketrank.settings.recipe import Recipe, load_recipe

# Short name -> the setting that it changes.
KEYS = {
    "epochs": "schedule.epochs",
    "batch": "data.batch_size",
    "imgsz": "inputs.min_size",
    "lr": "schedule.lr",
    "device": "trainer.accelerator",
    "workers": "data.workers",
}
ACCELERATORS = {"auto": "auto", "cpu": "cpu", "cuda": "cuda", "cuda:0": "cuda", "gpu": "cuda", "mps": "mps"}


@dataclass(frozen=True)
class ShortNames:
    """Settings by their short names; None where the recipe decides.

    >>> ShortNames(epochs=24, imgsz=640).changes("atss-r50-rs")
    {'schedule.epochs': 24, 'inputs.min_size': 640, 'schedule.milestones': [16, 22], 'inputs.max_size': 1066}
    >>> ShortNames(batch=4, device="cpu").changes("atss-laptop")
    {'data.batch_size': 4, 'trainer.accelerator': 'cpu', 'trainer.devices': '1'}
    """

    epochs: int | None = None  # passes over the training set
    batch: int | None = None  # images per step
    imgsz: int | None = None  # shorter side of the images
    lr: float | None = None  # learning rate
    device: str | None = None  # auto, cpu, cuda or mps
    workers: int | None = None  # data-loading workers

    def given(self) -> dict[str, Any]:
        """Return the short names that are given, with their values."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def changes(self, recipe: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the changes to a recipe by short names and by ``settings``, which are changes by key.

        Milestones scale with the number of epochs, and the upper limit of the longer side with that of the shorter.
        UsageError names a setting that is given twice, under both of its names.

        Args:
            recipe: name or file of the recipe.
            settings: further changes; they take precedence over values that are only scaled.
        """
        settings = settings or {}
        given = self.given()
        for name in given:
            if KEYS[name] in settings:
                raise UsageError(f"--{name}: is short for --{KEYS[name]}; give one of them")
        if not given:
            return dict(settings)
        before = load_recipe(recipe)
        changes = {KEYS[name]: value for name, value in given.items()}
        if self.epochs is not None:
            changes |= _scaled_milestones(before, self.epochs)
        if self.imgsz is not None:
            changes |= _scaled_limit(before, self.imgsz)
        if self.device is not None:
            changes |= _device(self.device)
        return changes | dict(settings)


def _scaled_milestones(recipe: Recipe, epochs: int) -> dict[str, Any]:
    schedule = recipe.schedule
    scaled = {max(1, round(milestone * epochs / schedule.epochs)) for milestone in schedule.milestones}
    return {"schedule.milestones": sorted(scaled)}


def _scaled_limit(recipe: Recipe, side: int) -> dict[str, Any]:
    """Keep the proportion of both limits; null stands for the limits of a library's model."""
    sides, limit = recipe.inputs.min_size, recipe.inputs.max_size
    if sides is None or limit is None:
        return {}
    return {"inputs.max_size": round(side * limit / (sides if isinstance(sides, int) else max(sides)))}


def _device(name: str) -> dict[str, Any]:
    if name not in ACCELERATORS:
        raise UsageError(
            f"--device: expected auto, cpu, cuda or mps, got {short_repr(name)}; choose a GPU with the environment "
            "variable CUDA_VISIBLE_DEVICES, or a number of GPUs with --trainer.devices"
        )
    chosen = {"trainer.accelerator": ACCELERATORS[name]}
    return chosen if name == "auto" else chosen | {"trainer.devices": "1"}
