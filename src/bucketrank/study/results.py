"""What came out of a study, row by row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bucketrank.bench.timing import Samples, Spread, ratio
from bucketrank.study.grid import SCORED, Row
from bucketrank.study.measure import Measured
from bucketrank.study.plan import Plan, scored
from bucketrank.study.runs import Run
from bucketrank.training.show import header

METRICS = ("AP", "AP50", "AP75")


@dataclass(frozen=True)
class Mean:
    """Over seeds; the deviation of a single one is NaN."""

    mean: float
    deviation: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """With the sample's deviation.

        >>> Mean.of([40.0, 42.0])
        Mean(mean=41.0, deviation=1.414..., values=(40.0, 42.0))
        """
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        return cls(statistics.fmean(values), deviation, tuple(values))


@dataclass(frozen=True)
class Result:
    """A row with its trainings that have come to their end.

    ``seconds`` of a step and its ratio ``to_scored``, the score-based loss on the same detector; ``paper`` has the
    paper's own numbers for the row, by name: AP, AP50, AP75 and seconds.
    """

    row: Row
    rate: float | None
    runs: tuple[Run, ...]
    paper: dict[str, float]
    seconds: float | None = None
    to_scored: Spread | None = None

    def mean(self, metric: str = "AP") -> Mean | None:
        """Over the seeds; None without any."""
        return Mean.of([run.metric(metric) for run in self.runs]) if self.runs else None

    @property
    def scored(self) -> bool:
        """Whether the loss looks at one score at a time."""
        return self.row.loss in SCORED

    @property
    def epochs(self) -> int | None:
        """Of its trainings."""
        return self.runs[0].load().schedule.epochs if self.runs else None


@dataclass(frozen=True)
class Outcome:
    """A study's results and how it came to them."""

    plan: Plan
    results: tuple[Result, ...]
    measured: dict[str, Measured]
    failed: dict[str, str]

    def of(self, detector: str) -> list[Result]:
        """The rows of a detector."""
        return [each for each in self.results if each.row.detector == detector]

    @property
    def detectors(self) -> list[str]:
        """In the table's order."""
        return list(dict.fromkeys(each.row.detector for each in self.results))

    @property
    def missing(self) -> int:
        """How many trainings have not come to their end."""
        return sum(self.plan.seeds - len(each.runs) for each in self.results)


def collect(plan: Plan, measured: dict[str, Measured], failed: dict[str, str]) -> Outcome:
    """The results of all trainings that have come to their end."""
    return Outcome(plan, tuple(_result(plan, row, measured) for row in plan.rows), measured, failed)


def _result(plan: Plan, row: Row, measured: dict[str, Measured]) -> Result:
    runs = tuple(run for run in plan.results(row) if run.finished)
    return Result(row, plan.rate(row), runs, published(row), *_seconds(plan, row, runs, measured))


def _seconds(
    plan: Plan, row: Row, runs: Sequence[Run], measured: dict[str, Measured]
) -> tuple[float | None, Spread | None]:
    """Of a step: as measured in turn, or else as the trainings wrote it down."""
    found: dict[str, Samples] = measured[row.detector].samples if row.detector in measured else {}
    if row.key in found:
        other = scored(plan.rows, row)
        compared = None if other is None or other.key not in found else ratio(found[row.key], found[other.key])
        return Spread.of(list(found[row.key].values())).median, compared
    # The first step has much to load.
    each = [seconds for run in runs for count, seconds in run.step_seconds()[1:] for _ in range(count)]
    return (statistics.median(each) if each else None), None


def published(row: Row) -> dict[str, float]:
    """The paper's numbers for the row; where a recipe stands for another's row, the note in brackets says so."""
    if row.paper is None:
        return {}
    head = header(row.paper)
    if "(" in head.row or head.numbers is None:
        return {}
    return {name: float(value) for name, value in head.numbers.items()}
