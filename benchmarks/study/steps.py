"""Single steps of a study's runs: seconds per step, measured in turn, and differences of first gradients.

The measurements are stored in ``steps.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.study.runs import StudyError, StudyRun, portable_command
from benchmarks.timing import Samples, TimedCall, interleave
from bucketrank.data import collate, find_splits
from bucketrank.detectors import Detector
from bucketrank.settings import Recipe, detector_spec
from bucketrank.training.batches import RunData as DataModule
from bucketrank.training.batches import SeededBatches, SeededDataset, seed_of
from bucketrank.training.fabric import quiet
from bucketrank.training.optimiser import Batch, build_optimiser, sum_terms, train_step
from bucketrank.weights.atomic import write_text
from bucketrank.weights.load import build_detector

FILE = "steps.json"


@dataclass(frozen=True)
class StepMeasurements:
    """The measurements of one detector.

    ``samples`` are the seconds of a step by row and round. ``gradients`` are the relative differences between the
    first gradients of the exact and the pairwise method, by loss. ``commands`` are those of the timed runs, by row.
    """

    samples: dict[str, Samples]
    gradients: dict[str, float]
    machine: dict[str, Any]
    commands: dict[str, str] = field(default_factory=dict)

    def covers(self, runs: Sequence[StudyRun], *, rounds: int) -> bool:
        """Return whether these runs were timed with their present settings for as many rounds."""
        return all(
            self.commands.get(run.row.key) == portable_command(run) and len(self.samples[run.row.key]) == rounds
            for run in runs
        )


def load_measurements(out: Path) -> dict[str, StepMeasurements]:
    """Return the measurements in the folder of a study, by detector."""
    path = out / FILE
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            detector: StepMeasurements(
                {
                    key: {int(turn): seconds for turn, seconds in samples.items()}
                    for key, samples in entry["samples"].items()
                },
                entry["gradients"],
                entry["machine"],
                entry.get("commands", {}),  # older files have none
            )
            for detector, entry in stored.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StudyError(f"{path}: cannot be read ({error!r:.80}); remove it to time the steps again") from error


def measure_steps(
    out: Path, runs: Mapping[str, Sequence[StudyRun]], *, rounds: int, say: Callable[[str], None]
) -> dict[str, StepMeasurements]:
    """Measure the steps of ``runs``, by detector; the runs of a detector take turns.

    Those that the file has with the same settings and number of rounds are not measured again.
    """
    measurements = load_measurements(out)
    for detector, own in runs.items():
        if detector in measurements and measurements[detector].covers(own, rounds=rounds):
            continue
        say(f"{detector}: {rounds} steps of each loss, in turn")
        measurements[detector] = _measure(own, rounds)
        write_text(out / FILE, _to_json(measurements))
    return measurements


def _measure(runs: Sequence[StudyRun], rounds: int) -> StepMeasurements:

    from bucketrank.provenance import describe

    machine = describe()
    methods = {(run.row.loss, run.row.method): run for run in runs if run.row.like is None}
    gradients = {
        loss: gradient_difference(methods[loss, "pairwise"], methods[loss, "exact"])
        for loss in ("rs", "ap")
        if {(loss, "pairwise"), (loss, "exact")} <= methods.keys()
    }
    commands = {run.row.key: portable_command(run) for run in runs}
    return StepMeasurements(time_steps(runs, rounds=rounds), gradients, dict(machine), commands)


def _to_json(measurements: dict[str, StepMeasurements]) -> str:
    return json.dumps({detector: vars(stored) for detector, stored in measurements.items()}, indent=1) + "\n"


WARM_UP = 2  # untimed steps of each run, which compile, load and fill caches


class StudyDetector:
    """The detector of a run with its optimiser, in the state in which the run starts."""

    def __init__(self, recipe: Recipe, *, classes: int) -> None:
        self.recipe = recipe
        self.model = initial_detector(recipe, classes=classes)
        self.optimiser = build_optimiser(self.model, recipe.schedule)

    def step(self, batch: Batch) -> None:
        """Train on one batch; the seed of the run decides what the detector samples."""
        torch.manual_seed(self.recipe.trainer.seed)
        summed = train_step(self.model, batch, self.optimiser, clip=self.recipe.schedule.clip)
        require_finite(summed.total)


def initial_detector(recipe: Recipe, *, classes: int) -> Detector:
    """Build the detector of the recipe with its initial weights, in training mode."""
    torch.manual_seed(seed_of(recipe.trainer.seed))
    with quiet():
        model = build_detector(recipe, num_classes=classes).train()
    return model.to(memory_format=torch.channels_last)  # like a CPU run


def summed_loss(model: Detector, batch: Batch, *, seed: int) -> Tensor:
    """Return the sum of all loss terms; the seed decides what the detector samples."""
    torch.manual_seed(seed)
    total = sum_terms(model, batch).total
    require_finite(total)
    return total


def require_finite(loss: Tensor) -> None:
    """Raise StudyError unless the loss of a step is finite."""
    if not loss.isfinite():
        raise StudyError(f"expected a finite loss in a step, got {float(loss)}")


def first_batches(run: StudyRun, count: int) -> tuple[list[Batch], int]:
    """Return the first ``count`` batches of a run, repeated if its epoch has fewer, and the number of classes."""
    recipe = run.load()
    splits = find_splits(run.data, layout=recipe.data.chosen_layout)
    splits = splits.with_holdout(recipe.data.holdout)
    masks = detector_spec(recipe.detector.name).load().predicts_masks(recipe.detector)
    data = DataModule(splits, recipe, masks=masks, check=False)
    sampler = SeededBatches(data.batches(), seed=recipe.trainer.seed, epoch=0)
    loader: DataLoader[Any] = DataLoader(SeededDataset(data.train), batch_sampler=sampler, collate_fn=collate)
    batches = [batch for batch, _ in zip(loader, range(count), strict=False)]
    return [batches[number % len(batches)] for number in range(count)], len(data.classes)


def time_steps(runs: Sequence[StudyRun], *, rounds: int) -> dict[str, Samples]:
    """Return the seconds of each step by row: the runs take turns, and all use the same batch in the same round."""
    batches, classes = first_batches(runs[0], rounds + WARM_UP)
    steps = {run.row.key: _next_step(StudyDetector(run.load(), classes=classes), batches) for run in runs}
    timed = {key: TimedCall(step, warmup=WARM_UP) for key, step in steps.items()}
    return interleave(timed, rounds=rounds, rotate=True)


def _next_step(detector: StudyDetector, batches: list[Batch]) -> Callable[[], None]:
    remaining = iter(batches)
    return lambda: detector.step(next(remaining))


def gradient_difference(one: StudyRun, other: StudyRun) -> float:
    """Return the largest difference between the first gradients of two runs, divided by the largest entry.

    Both runs start with the same weights and the same batch.
    """
    (batch,), classes = first_batches(one, 1)
    first, second = (_gradients(run.load(), batch, classes) for run in (one, other))
    if first.keys() != second.keys():
        return math.inf
    difference = max(float((first[name] - second[name]).abs().max()) for name in first)
    return difference / max(float(gradient.abs().max()) for gradient in first.values())


def _gradients(recipe: Recipe, batch: Batch, classes: int) -> dict[str, Tensor]:
    model = initial_detector(recipe, classes=classes)
    summed_loss(model, batch, seed=recipe.trainer.seed).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
