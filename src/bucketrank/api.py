"""Train and load detectors in Python, with the names of the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from rich.console import Console

from bucketrank.errors import BucketrankError, as_user_error
from bucketrank.inference.detections import Detections
from bucketrank.inference.hub import TrainedDetector
from bucketrank.inference.prediction import ImageInput
from bucketrank.report import write_report
from bucketrank.settings.flags import SHORT, ShortNames
from bucketrank.settings.recipe import flatten
from bucketrank.training.processes import Interrupted, is_first_process
from bucketrank.training.run import RunResult
from bucketrank.training.start import how_to_continue, recipe_and_folder, start_run

REPORT_FILE = "report.html"


@dataclass(frozen=True)
class Run(RunResult):
    """A finished run: its folder, metrics and weights, its detector and its report."""

    quiet: bool = False  # whether its methods print nothing

    @cached_property
    def model(self) -> TrainedDetector:
        """The trained detector, loaded from the run's weights when first used."""
        return TrainedDetector.from_pretrained(self.weights)

    def predict(self, images: ImageInput | Iterable[ImageInput], **options: Any) -> list[Detections]:
        """Detect objects with the run's detector; see :meth:`TrainedDetector.predict`."""
        return self.model.predict(images, **options)

    def report(self, *others: Run | Path | str, out: Path | str | None = None, **options: Any) -> Path:
        """Write an HTML report to ``out``, by default ``report.html`` in the run folder, and return its path.

        ``others`` are further runs or run folders to compare with, and ``options`` further arguments of
        :func:`bucketrank.report.write_report`.
        """
        folders = [self.folder, *(each.folder if isinstance(each, Run) else each for each in others)]
        console = Console(quiet=True) if self.quiet else None
        return write_report(folders, out or self.folder / REPORT_FILE, console=console, **options)


def train(
    recipe: str | Path | None = None,
    data: Path | str | None = None,
    *,
    epochs: int | None = None,
    batch: int | None = None,
    imgsz: int | None = None,
    lr: float | None = None,
    device: str | None = None,
    workers: int | None = None,
    time: str | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    allow_changed_data: bool = False,
    quiet: bool = False,
    settings: Mapping[str, Any] | None = None,
    **more_settings: Any,
) -> Run:
    """Train a detector, as ``bucketrank train`` does, and return the finished run.

    Every setting of the recipe can be changed: ``loss="rs"``, ``init="runs/first"``, or by its key, as in
    ``settings={"loss.delta": 0.25}`` and ``**{"loss.delta": 0.25}``. Raises BucketrankError for everything that a user
    can mend, and KeyboardInterrupt if the run is stopped; ``resume`` continues it.

    Args:
        recipe: name or file of a recipe; a run folder to resume.
        data: folder of the data set; may be left out to resume.
        epochs: passes over the training set; the milestones scale along.
        batch: images per step, over all devices; -1 for as many as fit on the GPU.
        imgsz: shorter side of the images in pixels; the limit of the longer scales along.
        lr: learning rate, for ``schedule.base_batch`` images per step.
        device: auto, cpu, cuda or mps.
        workers: data-loading workers per device.
        time: train for this time, like ``"2h"`` or ``"90m"``, instead of epochs.
        out: run folder; by default runs/RECIPE, then runs/RECIPE-2, and so on.
        resume: continue the run in ``out``, or start it if ``out`` holds no run.
        allow_changed_data: resume although images or annotations changed.
        quiet: print nothing.
        settings: changes of the recipe, by key or in groups.
        more_settings: further changes of the recipe, by key.
    """
    for name, value in {"recipe": recipe, "data": data, "out": out}.items():
        if value is not None:
            _require_path(f"train: {name}", value)
    changes = _by_key(settings or {}) | _by_key(more_settings)
    short = ShortNames(epochs=epochs, batch=batch, imgsz=imgsz, lr=lr, device=device, workers=workers, time=time)
    recipe, folder = recipe_and_folder(recipe, data, out, resume=resume)
    try:
        result = start_run(
            recipe,
            data,
            folder,
            short=short,
            settings=changes,
            resume=resume,
            allow_changed_data=allow_changed_data,
            console=Console(quiet=True) if quiet else None,
        )
    except Interrupted as stop:
        if not is_first_process():  # a process of a multi-GPU run; another status would make Lightning kill the first
            sys.exit(0)
        raise KeyboardInterrupt(f"bucketrank.train: stopped; {how_to_continue(folder)}") from stop
    except (OSError, MemoryError, RuntimeError) as error:
        user_error = as_user_error(error)
        if user_error is None or isinstance(error, BucketrankError):
            raise
        raise user_error from error
    return Run(result.folder, result.metrics, result.weights, result.steps, quiet=quiet)


def load(weights: Path | str | Run) -> TrainedDetector:
    """Load a trained detector: ``bucketrank.load("runs/first").predict("street.jpg")``.

    ``weights`` is a run folder, a weights file, a ``save_pretrained`` folder, a hub repository like ``"owner/name"``,
    or a run.
    """
    if isinstance(weights, Run):
        return weights.model
    _require_path("load: weights", weights)
    return TrainedDetector.from_pretrained(weights)


def _require_path(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a path or its text."""
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name}: expected a path or text, got {type(value).__name__}")


def _by_key(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes by key; ``loss`` stands for ``loss.name``, as on the command line.

    >>> _by_key({"loss": "rs", "data": {"flip": 0.0}, "schedule.clip": 10})
    {'loss.name': 'rs', 'data.flip': 0.0, 'schedule.clip': 10}
    """
    short = {flag.removeprefix("--"): key.removeprefix("--") for flag, key in SHORT.items()}
    return {short.get(key, key): value for key, value in flatten(changes).items()}
