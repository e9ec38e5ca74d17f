"""The plan of a cell: which contenders run, in how many rounds, and which are skipped because they take too long."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bucketrank.bench.flags import FEWEST_ROUNDS
from bucketrank.bench.losses.loss_contenders import BASELINES, LOSSES, METHODS, loss_step, why_unavailable
from bucketrank.bench.losses.loss_results import LossBenchSettings
from bucketrank.bench.losses.step_estimate import StepPart, estimate_step
from bucketrank.bench.losses.synthetic_logits import SyntheticLogits, draw_logits
from bucketrank.bench.measurement import MeasurementError, Progress, synchronizer
from bucketrank.bench.timing import TimedCall

NAMES: list[tuple[str, str | None]] = [
    *((name, None) for name in BASELINES),
    *((name, loss) for loss in LOSSES for name in METHODS),
]
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

    @property
    def title(self) -> str:
        return f"{LOSSES[self.loss]} {self.name}" if self.loss else self.name

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

    def timed_call(self, data: SyntheticLogits, values: dict[str, float], settings: LossBenchSettings) -> TimedCall:
        """Return the call to time; it stores its loss in ``values``, and its errors name the contender."""
        part = data.thinned(self.positives) if self.positives else data
        step = loss_step(self.planned.name, self.planned.loss, part)

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


def plan_cell(size: int, percent: float, settings: LossBenchSettings, progress: Progress) -> list[PlannedContender]:
    """Return the contenders of a cell with their estimated times; those that take too long are marked as skipped."""
    data = draw_logits(size, percent, seed=settings.seed, device=settings.device)
    planned = []
    for name, loss in NAMES:
        contender = PlannedContender(name, loss, size, percent, skipped=why_unavailable(name, settings.device))
        progress.advance(str(contender), 1)
        planned.append(_estimated(contender, data, settings) if contender.skipped is None else contender)
    return planned


def _estimated(contender: PlannedContender, data: SyntheticLogits, settings: LossBenchSettings) -> PlannedContender:
    limit = settings.max_seconds_per_cell
    apart, synchronize = max(limit / 100, LEAST_APART), synchronizer(settings.device)
    try:
        seconds, parts = estimate_step(contender.name, contender.loss, data, apart=apart, synchronize=synchronize)
    except Exception as error:
        raise MeasurementError(f"bench losses: {contender}: {error}") from error
    calls = math.ceil(settings.repeats / every_nth(seconds, settings))
    if calls * seconds <= limit:
        return replace(contender, seconds=seconds)
    skipped = f"by estimate {calls} calls would exceed {limit:g} s"
    return replace(contender, seconds=seconds, parts=parts, skipped=skipped)
