"""The first training steps of a study's runs: their seconds, measured in turn, and the difference of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bucketrank.bench.timing import Samples, TimedCall, interleave
from bucketrank.data import collate, find_splits
from bucketrank.detectors import Detector
from bucketrank.settings import Recipe, detector_spec
from bucketrank.study.study_run import StudyError, StudyRun
from bucketrank.training.data_module import DataModule, SeededBatches, SeededDataset, seed_of
from bucketrank.training.process_state import quiet
from bucketrank.training.schedule import build_optimiser
from bucketrank.training.train_step import Batch, sum_terms, train_step
from bucketrank.weights.load import build_detector

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
    return model.to(memory_format=torch.channels_last)  # as in a run on a CPU


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
