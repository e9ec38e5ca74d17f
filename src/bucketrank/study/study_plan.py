"""All runs of a study in their order: first the trials that choose a learning rate, then every row with every seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

from bucketrank.settings import load_recipe
from bucketrank.study.grid import SCORED, Row, Study
from bucketrank.study.study_run import HOLDOUT, StudyError, StudyRun


@dataclass(frozen=True)
class StudyPlan:
    """The rows of a study on one data set with one budget.

    The recipe's learning rate times each of ``factors`` is tried for the first row of each loss, and judged by images
    that are held out of the training set; all rows of this loss use the best rate. ``seconds`` per step, by the keys of
    the rows, decide how many epochs a row may train in the time of the row that it is ``like``. ``flags`` are settings
    for every run.
    """

    study: Study
    rows: tuple[Row, ...]
    paper: bool
    data: Path
    out: Path
    seeds: int = 1
    factors: tuple[float, ...] = (1.0,)
    flags: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def recipe(self, row: Row) -> str:
        """Return the name of the row's recipe in this budget."""
        return str(row.paper if self.paper else row.small)

    def run(self, row: Row, *, rate: float, seed: int) -> StudyRun:
        """Return a run of the row."""
        flags = (*(() if self.paper else row.flags), *self.flags, *self._longer(row))
        return StudyRun(row, self.recipe(row), flags, rate, seed, self.data, self.out)

    def _longer(self, row: Row) -> tuple[str, ...]:
        """Return the flag for the epochs that fit in the time of the row that this one is like.

        The paper's recipes need no flag: they already have these epochs.
        """
        if row.like is None or self.paper:
            return ()
        epochs = load_recipe(self.recipe(row), [*row.flags, *self.flags]).schedule.epochs
        own, other = self.seconds.get(row.key), self.seconds.get(row.like)
        if own is None or other is None:
            return ()
        return ("--schedule.epochs", str(max(epochs, math.floor(epochs * other / own))))

    def rates(self, row: Row) -> list[float]:
        """Return the learning rates to try."""
        return [float(f"{self.usual_rate(row) * factor:.6g}") for factor in self.factors]

    def usual_rate(self, row: Row) -> float:
        """Return the learning rate of the recipe."""
        return load_recipe(self.recipe(row), list(self.flags)).schedule.lr

    def first_runs(self) -> dict[str, list[StudyRun]]:
        """Return one run of each row by detector, with the recipe's rate, whose steps are timed."""
        runs: dict[str, list[StudyRun]] = {}
        for row in self.rows:
            runs.setdefault(row.detector, []).append(self.run(row, rate=self.usual_rate(row), seed=0))
        return runs

    def families(self) -> list[Row]:
        """Return the first row of each loss of each detector."""
        return list({row.family: row for row in reversed(self.rows)}.values())[::-1]

    def trials(self, row: Row) -> list[StudyRun]:
        """Return the runs that choose the learning rate of the row."""
        first = next(candidate for candidate in self.rows if candidate.family == row.family)
        held_out = ("--data.holdout", f"{HOLDOUT:g}")
        runs = [self.run(first, rate=rate, seed=0) for rate in self.rates(first)]
        return [replace(run, flags=(*run.flags, *held_out), trial=True) for run in runs]

    def rate(self, row: Row) -> float | None:
        """Return the learning rate of the best finished trial; None if no trial is finished."""
        rates = self.rates(row)
        if len(rates) == 1:
            return rates[0]
        aps = {trial.rate: trial.metric() for trial in self.trials(row) if trial.finished}
        aps = {rate: ap for rate, ap in aps.items() if not math.isnan(ap)}
        return max(aps, key=lambda rate: aps[rate], default=None)

    def results(self, row: Row) -> list[StudyRun]:
        """Return the runs of the row, one per seed, at the chosen learning rate; empty before a rate is chosen."""
        rate = self.rate(row)
        return [] if rate is None else [self.run(row, rate=rate, seed=seed) for seed in range(self.seeds)]

    @property
    def total(self) -> int:
        """The number of runs, with the trials."""
        trials = len(self.factors) if len(self.factors) > 1 else 0
        return len(self.rows) * self.seeds + trials * len(self.families())


def scored(rows: Sequence[Row], row: Row) -> Row | None:
    """Return the score-based row of the same detector, or None."""
    return next((other for other in rows if other.detector == row.detector and other.loss in SCORED), None)


def choose_rows(study: Study, *, paper: bool, dataset: str = "COCO", only: str | None = None) -> tuple[Row, ...]:
    """Return the rows of a budget whose key matches one of the patterns in ``only``.

    With the paper's budget, only rows on ``dataset`` are returned.
    """
    rows = tuple(row for row in study.rows if (row.paper if paper else row.small) is not None)
    if paper:
        datasets = list(dict.fromkeys(row.dataset for row in rows))
        rows = tuple(row for row in rows if row.dataset == dataset)
        if not rows:
            raise StudyError(f"{study.name}: the paper has no rows on {dataset}, only on {', '.join(datasets)}")
    if only is None:
        return rows
    patterns = only.split(",")
    for pattern in patterns:
        if not any(fnmatch(row.key, pattern) for row in rows):
            raise StudyError(f"--only: no row matches {pattern!r}; the rows are {', '.join(row.key for row in rows)}")
    return tuple(row for row in rows if any(fnmatch(row.key, pattern) for pattern in patterns))
