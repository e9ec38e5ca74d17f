"""Who runs in a cell, how often, and who is left out because it would take too long."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from bucketrank.bench.contenders import BASELINES, LOSSES, METHODS, step, synchronizer, unavailable
from bucketrank.bench.estimate import Part, estimate
from bucketrank.bench.flags import FEWEST_ROUNDS
from bucketrank.bench.study import CellError, Progress, Settings
from bucketrank.bench.synthetic import Synthetic, draw
from bucketrank.bench.timing import Contender

NAMES: list[tuple[str, str | None]] = [
    *((name, None) for name in BASELINES),
    *((name, loss) for loss in LOSSES for name in METHODS),
]
# Parts of a step that differ by fewer seconds differ by noise.
LEAST_APART = 0.03
# A step shorter than this, in seconds, is called once untimed before each timed call.
SHORT = 0.01


@dataclass(frozen=True)
class Planned:
    """A contender in a cell before it runs. If it is ``skipped`` for its length, ``parts`` of it run instead."""

    name: str
    loss: str | None
    size: int
    percent: float
    seconds: float | None = None
    skipped: str | None = None
    parts: tuple[Part, ...] = ()

    @property
    def title(self) -> str:
        return f"{LOSSES[self.loss]} {self.name}" if self.loss else self.name

    def __str__(self) -> str:
        return f"{self.title} at L = {self.size}, {self.percent:g} % positives"

    def turns(self) -> list[Turn]:
        """What takes turns with the other contenders: the step, or the parts of it, or nothing."""
        if self.skipped is None and self.seconds is not None:
            return [Turn(self, self.seconds)]
        return [Turn(self, part.seconds, part.positives) for part in self.parts]


@dataclass(frozen=True)
class Turn:
    """One callable among those that take turns; with ``positives``, a step with only so many of them."""

    planned: Planned
    seconds: float
    positives: int | None = None

    @property
    def title(self) -> str:
        return self.planned.title + (f", {self.positives} positives" if self.positives else "")

    def contender(self, data: Synthetic, values: dict[str, float], settings: Settings) -> Contender:
        """Keeps its loss in ``values``; its errors say where they come from."""
        part = data.thinned(self.positives) if self.positives else data
        run = step(self.planned.name, self.planned.loss, part)

        def named() -> None:
            try:
                values[self.title] = run()
            except Exception as error:
                raise CellError(f"bench losses: {self.planned}: {error}") from error

        return Contender(named, every_nth(self.seconds, settings), self._warmup, self._untimed)

    def cost(self, settings: Settings) -> float:
        """Seconds that all its calls will take."""
        rounds = math.ceil(settings.repeats / every_nth(self.seconds, settings))
        return (rounds * (1 + self._untimed) + self._warmup) * self.seconds

    @property
    def _warmup(self) -> int:
        return 1 if self.seconds < 0.5 else 0

    @property
    def _untimed(self) -> int:
        return 1 if self.seconds < SHORT else 0


def every_nth(seconds: float, settings: Settings) -> int:
    """In every how many-th round a step of ``seconds`` takes part.

    The slower, the rarer: a power of two, for at most a sixth of the time limit, but for at least three rounds.
    """
    every = 1
    while math.ceil(settings.repeats / every) * seconds > settings.max_seconds_per_cell / 6:
        if math.ceil(settings.repeats / (2 * every)) < FEWEST_ROUNDS:
            break
        every *= 2
    return every


def plan(size: int, percent: float, settings: Settings, progress: Progress) -> list[Planned]:
    """The contenders of a cell with the time each would take, and which of them take too long."""
    data = draw(size, percent, seed=settings.seed, device=settings.device)
    planned = []
    for name, loss in NAMES:
        entry = Planned(name, loss, size, percent, skipped=unavailable(name, settings.device))
        progress.advance(str(entry), 1)
        planned.append(_estimated(entry, data, settings) if entry.skipped is None else entry)
    return planned


def _estimated(entry: Planned, data: Synthetic, settings: Settings) -> Planned:
    limit = settings.max_seconds_per_cell
    synchronize: Callable[[], None] = synchronizer(settings.device)
    try:
        seconds, parts = estimate(
            entry.name, entry.loss, data, apart=max(limit / 100, LEAST_APART), synchronize=synchronize
        )
    except Exception as error:
        raise CellError(f"bench losses: {entry}: {error}") from error
    calls = math.ceil(settings.repeats / every_nth(seconds, settings))
    if calls * seconds <= limit:
        return replace(entry, seconds=seconds)
    return replace(entry, seconds=seconds, parts=parts, skipped=f"by estimate {calls} calls would exceed {limit:g} s")
