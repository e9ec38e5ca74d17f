"""Steps of training outside of a training: how long each takes, the rows in turn, and whether their gradients agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bucketrank.bench.timing import Contender, Samples, interleave
from bucketrank.data import collate, find_splits
from bucketrank.detectors import DETECTORS, Detector
from bucketrank.study.runs import Run, StudyError
from bucketrank.training.data import Batches, Data, Seeded, seed_of
from bucketrank.training.module import Batch
from bucketrank.training.recipe import Recipe
from bucketrank.training.run import quiet
from bucketrank.training.schedule import build_optimiser
from bucketrank.training.weights import build_detector

WARM_UP = 2  # steps before it counts: the first ones compile, load and fill caches


class Trainee:
    """The detector of a run with its optimiser, as at the start of its training."""

    def __init__(self, recipe: Recipe, *, classes: int) -> None:
        self.recipe = recipe
        self.model = fresh(recipe, classes=classes)
        self.optimiser = build_optimiser(self.model, recipe.schedule)

    def step(self, batch: Batch) -> None:
        """One step of training."""
        self.optimiser.zero_grad()
        total(self.model, batch, seed=self.recipe.trainer.seed).backward()
        if self.recipe.schedule.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.schedule.clip)
        self.optimiser.step()


def fresh(recipe: Recipe, *, classes: int) -> Detector:
    """The detector as its training begins."""
    torch.manual_seed(seed_of(recipe.trainer.seed))
    with quiet():
        return build_detector(recipe, num_classes=classes).train()


def total(model: Detector, batch: Batch, *, seed: int) -> Tensor:
    """The sum of all loss terms; whatever the detector draws by chance follows from the seed."""
    torch.manual_seed(seed)
    terms: dict[str, Tensor] = model(*batch)
    value = torch.stack(list(terms.values())).sum()
    if not value.isfinite():
        raise StudyError(f"expected a finite loss in a step, got {float(value)}")
    return value


def batches(run: Run, count: int) -> tuple[list[Batch], int]:
    """The first batches of a run's training, again from the start if there are fewer, and the number of classes."""
    recipe = run.load()
    splits = find_splits(run.data, layout=None if recipe.data.layout == "auto" else recipe.data.layout)
    data = Data(splits, recipe, masks=DETECTORS[recipe.detector["name"]].masks, check=False)
    sampler = Batches(data.batches(), seed=recipe.trainer.seed, epoch=0)
    loader: DataLoader[Any] = DataLoader(Seeded(data.train), batch_sampler=sampler, collate_fn=collate)
    found = [batch for batch, _ in zip(loader, range(count), strict=False)]
    return [found[number % len(found)] for number in range(count)], len(data.classes)


def time_steps(runs: Sequence[Run], *, rounds: int) -> dict[str, Samples]:
    """Seconds of a step by the runs' rows: every run in turn, round after round, all on the round's batch."""
    given, classes = batches(runs[0], rounds + WARM_UP)
    steps = {run.row.key: _next_step(Trainee(run.load(), classes=classes), given) for run in runs}
    contenders = {key: Contender(step, warmup=WARM_UP) for key, step in steps.items()}
    return interleave(contenders, rounds=rounds, rotate=True)


def _next_step(trainee: Trainee, given: list[Batch]) -> Callable[[], None]:
    rest = iter(given)
    return lambda: trainee.step(next(rest))


def gradient_difference(one: Run, other: Run) -> float:
    """How far the gradients of two runs are apart in their first step: largest difference by largest entry.

    Both begin with the same weights and the same batch.
    """
    (batch,), classes = batches(one, 1)
    found = []
    for run in (one, other):
        recipe = run.load()
        model = fresh(recipe, classes=classes)
        total(model, batch, seed=recipe.trainer.seed).backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    first, second = found
    if first.keys() != second.keys():
        return math.inf
    apart = max(float((first[name] - second[name]).abs().max()) for name in first)
    return apart / max(float(gradient.abs().max()) for gradient in first.values())
