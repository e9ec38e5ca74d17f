"""The plan of a cell: which contenders run, in how many rounds, and which are skipped because they take too long."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bucketrank.bench.device_clock import device_clock
from bucketrank.bench.flags import FEWEST_ROUNDS
from bucketrank.bench.losses.loss_contenders import (
    BASELINES,
    LOSSES,
    QUADRATIC,
    contender_names,
    loss_step,
    why_unavailable,
)
from bucketrank.bench.losses.loss_modes import Mode, modes_of
from bucketrank.bench.losses.loss_results import LossBenchSettings
from bucketrank.bench.losses.step_estimate import StepPart, estimate_step
from bucketrank.bench.losses.synthetic_logits import SyntheticLogits, draw_logits
from bucketrank.bench.measurement import MeasurementError, Progress
from bucketrank.bench.timing import TimedCall

# Smaller differences, in seconds, between the times of two parts of a step are noise.
LEAST_APART = 0.03
# A step shorter than this, in seconds, is called once untimed before each timed call.
SHORT = 0.01


@dataclass(frozen=True)
class PlannedContender:
    """A contender in a cell before it runs; if it is ``skipped`` because it is too slow, its ``parts`` run instead."""

    name: str
    loss: str | None
    size: int
    percent: float
    seconds: float | None = None
    skipped: str | None = None
    parts: tuple[StepPart, ...] = ()
    mode: Mode = "eager"

    @property
    def title(self) -> str:
        title = f"{LOSSES[self.loss]} {self.name}" if self.loss else self.name
        return title if self.mode == "eager" else f"{title}, {self.mode}"

    def __str__(self) -> str:
        return f"{self.title} at L = {self.size}, {self.percent:g} % positives"

    def turns(self) -> list[Turn]:
        """Return what takes turns with the other contenders: the whole step, its parts, or nothing."""
        if self.skipped is None and self.seconds is not None:
            return [Turn(self, self.seconds)]
        return [Turn(self, part.seconds, part.positives) for part in self.parts]


@dataclass(frozen=True)
class Turn:
    """A step that takes turns with others; with ``positives``, the part of the step that keeps this many positives."""

    planned: PlannedContender
    seconds: float
    positives: int | None = None

    @property
    def title(self) -> str:
        return self.planned.title + (f", {self.positives} positives" if self.positives else "")

    def timed_call(
        self, data: SyntheticLogits, values: dict[str, Tensor | float], settings: LossBenchSettings
    ) -> TimedCall:
        """Return the call to time; it stores its loss in ``values``, and its errors name the contender."""
        part = data.thinned(self.positives) if self.positives else data
        step = loss_step(self.planned.name, self.planned.loss, part, mode=self.planned.mode)

        def call() -> None:
            try:
                values[self.title] = step()
            except Exception as error:
                raise MeasurementError(f"bench losses: {self.planned}: {error}") from error

        return TimedCall(call, every_nth(self.seconds, settings), self._warmup, self._untimed)

    def cost(self, settings: LossBenchSettings) -> float:
        """Return the seconds that all calls together will take."""
        rounds = math.ceil(settings.repeats / every_nth(self.seconds, settings))
        return (rounds * (1 + self._untimed) + self._warmup) * self.seconds

    @property
    def _warmup(self) -> int:
        return 1 if self.seconds < 0.5 else 0

    @property
    def _untimed(self) -> int:
        return 1 if self.seconds < SHORT else 0


def every_nth(seconds: float, settings: LossBenchSettings) -> int:
    """Return n such that a step of ``seconds`` runs in every n-th round, a power of two.

    A step takes at most a sixth of the time limit of its cell, but runs in at least three rounds.
    """
    every = 1
    while math.ceil(settings.repeats / every) * seconds > settings.max_seconds_per_cell / 6:
        if math.ceil(settings.repeats / (2 * every)) < FEWEST_ROUNDS:
            break
        every *= 2
    return every


def contenders_of(settings: LossBenchSettings) -> list[tuple[str, str | None, Mode]]:
    """Return the name, the loss and the mode of every contender in a cell."""
    names = contender_names(settings.device)
    pairs: list[tuple[str, str | None]] = [(name, None) for name in names if name in BASELINES]
    pairs += [(name, loss) for loss in LOSSES for name in names if name not in BASELINES]
    return [
        (name, loss, mode)
        for name, loss in pairs
        for mode in modes_of(name, settings.device, compiled=settings.compiled)
    ]


def plan_cell(size: int, percent: float, settings: LossBenchSettings, progress: Progress) -> list[PlannedContender]:
    """Return the contenders of a cell with their estimated times; those that take too long are marked as skipped."""
    data = draw_logits(size, percent, seed=settings.seed, device=settings.device)
    planned: list[PlannedContender] = []
    for name, loss, mode in contenders_of(settings):
        skipped = why_unavailable(name, settings.device)
        contender = PlannedContender(name, loss, size, percent, skipped=skipped, mode=mode)
        progress.advance(str(contender), 1)
        if mode != "eager" and name in QUADRATIC and planned[-1].skipped:
            contender = replace(contender, skipped="the eager step is skipped, too")
        planned.append(_estimated(contender, data, settings) if contender.skipped is None else contender)
    return planned


def _estimated(contender: PlannedContender, data: SyntheticLogits, settings: LossBenchSettings) -> PlannedContender:
    limit = settings.max_seconds_per_cell
    apart, clock = max(limit / 100, LEAST_APART), device_clock(settings.device)
    try:
        seconds, parts = estimate_step(
            contender.name, contender.loss, data, apart=apart, clock=clock, mode=contender.mode
        )
    except torch.OutOfMemoryError:
        return replace(contender, skipped="the device has too little memory")
    except Exception as error:
        # torch.compile and captures depend on compilers and drivers; the other contenders do not need them.
        if contender.mode != "eager":
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return replace(contender, skipped=f"it failed: {reason}")
        raise MeasurementError(f"bench losses: {contender}: {error}") from error
    calls = math.ceil(settings.repeats / every_nth(seconds, settings))
    if calls * seconds <= limit:
        return replace(contender, seconds=seconds)
    skipped = f"by estimate {calls} calls would exceed {limit:g} s"
    return replace(contender, seconds=seconds, parts=parts, skipped=skipped)
