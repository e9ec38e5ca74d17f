"""The results of a study: for each row its finished runs, its seconds per step and the paper's numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bucketrank.bench.timing import Samples, Spread, ratio
from bucketrank.settings.paper import paper_rows
from bucketrank.study.grid import SCORED, Row
from bucketrank.study.step_measurements import StepMeasurements
from bucketrank.study.study_plan import StudyPlan, scored
from bucketrank.study.study_run import StudyRun

METRICS = ("AP", "AP50", "AP75")


@dataclass(frozen=True)
class SeedMean:
    """The mean and the standard deviation over seeds; the deviation of a single seed is NaN."""

    mean: float
    deviation: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> SeedMean:
        """Return the mean of ``values`` with the deviation of the sample.

        >>> SeedMean.of([40.0, 42.0])
        SeedMean(mean=41.0, deviation=1.414..., values=(40.0, 42.0))
        """
        known = len(values) > 1 and not any(map(math.isnan, values))
        deviation = statistics.stdev(values) if known else math.nan
        return cls(statistics.fmean(values), deviation, tuple(values))


@dataclass(frozen=True)
class RowResult:
    """A row with its learning ``rate`` and its finished ``runs``.

    ``seconds`` is the time per step, ``to_scored`` its ratio to the score-based loss on the same detector. ``paper``
    holds the paper's numbers for the row: AP, AP50, AP75 and seconds.
    """

    row: Row
    rate: float | None
    runs: tuple[StudyRun, ...]
    paper: dict[str, float]
    seconds: float | None = None
    to_scored: Spread | None = None

    def mean(self, metric: str = "AP") -> SeedMean | None:
        """Return the mean of a metric over the seeds; None without a finished run."""
        return SeedMean.of([run.metric(metric) for run in self.runs]) if self.runs else None

    @property
    def scored(self) -> bool:
        """Whether the loss is score-based, not ranking-based."""
        return self.row.loss in SCORED

    @property
    def epochs(self) -> int | None:
        """The epochs of the runs; None without a finished run."""
        return self.runs[0].load().schedule.epochs if self.runs else None


@dataclass(frozen=True)
class StudyOutcome:
    """The plan of a study with its results, step measurements by detector, and failed runs by name."""

    plan: StudyPlan
    results: tuple[RowResult, ...]
    measured: dict[str, StepMeasurements]
    failed: dict[str, str]

    def of(self, detector: str) -> list[RowResult]:
        """Return the results of one detector."""
        return [result for result in self.results if result.row.detector == detector]

    @property
    def detectors(self) -> list[str]:
        """The detectors, in the order of the table."""
        return list(dict.fromkeys(result.row.detector for result in self.results))

    @property
    def missing(self) -> int:
        """The number of runs that are not finished."""
        return sum(self.plan.seeds - len(result.runs) for result in self.results)


def collect(plan: StudyPlan, measured: dict[str, StepMeasurements], failed: dict[str, str]) -> StudyOutcome:
    """Collect the results of all finished runs."""
    return StudyOutcome(plan, tuple(_result(plan, row, measured) for row in plan.rows), measured, failed)


def _result(plan: StudyPlan, row: Row, measured: dict[str, StepMeasurements]) -> RowResult:
    runs = tuple(run for run in plan.results(row) if run.finished)
    return RowResult(row, plan.rate(row), runs, published(row), *_seconds(plan, row, runs, measured))


def _seconds(
    plan: StudyPlan, row: Row, runs: Sequence[StudyRun], measured: dict[str, StepMeasurements]
) -> tuple[float | None, Spread | None]:
    """Return the seconds per step and their ratio to the score-based row.

    Without a step measurement, the seconds are those that the runs logged, without a ratio.
    """
    samples: dict[str, Samples] = measured[row.detector].samples if row.detector in measured else {}
    if row.key in samples:
        other = scored(plan.rows, row)
        to_scored = None if other is None or other.key not in samples else ratio(samples[row.key], samples[other.key])
        return Spread.of(list(samples[row.key].values())).median, to_scored
    # The first logged interval is left out: it includes loading and compiling.
    logged = [seconds for run in runs for count, seconds in run.step_seconds()[1:] for _ in range(count)]
    return (statistics.median(logged) if logged else None), None


def published(row: Row) -> dict[str, float]:
    """Return the paper's numbers for the row; empty for exact losses, which the paper does not have."""
    return next((dict(published.numbers) for published in paper_rows() if row.paper == published.recipe), {})
