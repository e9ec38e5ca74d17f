"""All trainings of a study, in their order: first those that choose a learning rate, then all rows with all seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from bucketrank.study.grid import SCORED, Row, Study
from bucketrank.study.runs import Run, StudyError
from bucketrank.training.recipe import load


@dataclass(frozen=True)
class Plan:
    """The rows of a study on one data set with one budget.

    ``factors`` of the recipe's learning rate are tried with the first seed, for the first row of each loss; all rows of
    this loss take the best. ``seconds`` of a step, where known, tell how much longer a row may train that is to use
    another row's time.
    """

    study: Study
    rows: tuple[Row, ...]
    paper: bool
    data: Path
    out: Path
    seeds: int = 1
    factors: tuple[float, ...] = (1.0,)
    flags: tuple[str, ...] = ()  # for every training
    seconds: Mapping[str, float] = field(default_factory=dict)  # of a step, by the rows' keys

    def recipe(self, row: Row) -> str:
        """Of the row, in this budget."""
        return str(row.paper if self.paper else row.small)

    def run(self, row: Row, *, rate: float, seed: int) -> Run:
        """A training of the row."""
        flags = (*(() if self.paper else row.flags), *self.flags, *self._longer(row))
        return Run(row, self.recipe(row), flags, rate, seed, self.data, self.out)

    def _longer(self, row: Row) -> tuple[str, ...]:
        """As many epochs as the time of the row it is compared with allows; the paper's recipes know by themselves."""
        if row.like is None or self.paper:
            return ()
        epochs = load(self.recipe(row), [*row.flags, *self.flags]).schedule.epochs
        mine, other = self.seconds.get(row.key), self.seconds.get(row.like)
        if mine is None or other is None:
            return ()
        return ("--schedule.epochs", str(max(epochs, math.floor(epochs * other / mine))))

    def rates(self, row: Row) -> list[float]:
        """The learning rates that are tried."""
        return [float(f"{self.usual_rate(row) * factor:.6g}") for factor in self.factors]

    def usual_rate(self, row: Row) -> float:
        """The recipe's."""
        return load(self.recipe(row), list(self.flags)).schedule.lr

    def families(self) -> list[Row]:
        """The first row of each loss of each detector."""
        return list({row.family: row for row in reversed(self.rows)}.values())[::-1]

    def trials(self, row: Row) -> list[Run]:
        """The runs that choose the row's learning rate."""
        first = next(each for each in self.rows if each.family == row.family)
        return [self.run(first, rate=rate, seed=0) for rate in self.rates(first)]

    def rate(self, row: Row) -> float | None:
        """The learning rate of the best trial; None if none has come to its end."""
        rates = self.rates(row)
        if len(rates) == 1:
            return rates[0]
        ended = {trial.rate: trial.metric() for trial in self.trials(row) if trial.finished}
        ended = {rate: value for rate, value in ended.items() if not math.isnan(value)}
        return max(ended, key=lambda rate: ended[rate], default=None)

    def results(self, row: Row) -> list[Run]:
        """The row's trainings, one for each seed, with the chosen rate; none before there is one."""
        rate = self.rate(row)
        return [] if rate is None else [self.run(row, rate=rate, seed=seed) for seed in range(self.seeds)]

    @property
    def total(self) -> int:
        """How many trainings there are; a chosen trial is the first seed of its row."""
        extra = len(self.factors) - 1
        return len(self.rows) * self.seeds + extra * len(self.families())


def scored(rows: Sequence[Row], row: Row) -> Row | None:
    """The score-based row of the same detector."""
    return next((each for each in rows if each.detector == row.detector and each.loss in SCORED), None)


def choose_rows(study: Study, *, paper: bool, dataset: str = "COCO", only: str | None = None) -> tuple[Row, ...]:
    """The rows of a budget, on the data set at hand, whose key fits one of the patterns in ``only``."""
    rows = tuple(row for row in study.rows if (row.paper if paper else row.small) is not None)
    if paper:
        sets = list(dict.fromkeys(row.dataset for row in rows))
        rows = tuple(row for row in rows if row.dataset == dataset)
        if not rows:
            raise StudyError(f"{study.name}: the paper has no rows on {dataset}, only on {', '.join(sets)}")
    if only is None:
        return rows
    patterns = only.split(",")
    for pattern in patterns:
        if not any(fnmatch(row.key, pattern) for row in rows):
            raise StudyError(f"--only: no row is called {pattern!r}; there are {', '.join(row.key for row in rows)}")
    return tuple(row for row in rows if any(fnmatch(row.key, pattern) for pattern in patterns))
