"""The runs of a study: trials choose a learning rate for every loss, then each arm is trained with every seed.

:class:`StudyPlan` is the base class. :class:`PaperPlan` trains the rows of a paper table, :class:`LossPlan` compares
losses in one detector. Neither tunes anything on the images that the tables report. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from benchmarks.study.grid import ONE_HEAD, SCORED, ComparedDetector, Head, Row, Study
from benchmarks.study.runs import Choice, RunRecord, StudyError, StudyRun
from bucketrank.data import find_splits
from bucketrank.errors import DataError
from bucketrank.settings import Recipe, load_recipe, parse_flags
from bucketrank.settings.recipe import require_init

HOLDOUT = 0.2  # fraction of the training images held out to compare trials
BALANCED = ("rs", "rsq")  # losses whose papers balance the box loss; the others give it a fixed weight
EVALUATIONS = 10  # approximate number per final run
NEVER = 1_000_000  # epochs between evaluations: a trial is evaluated only at the end


class Arm(NamedTuple):
    """One line of a comparison: a row on a data set."""

    row: Row
    data: Path


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """The planner of a study: for each family of arms the trials, the choice, and then the runs with every seed.

    A family is a loss of a detector on a data set. Each of ``factors`` times the recipe's learning rate is tried with
    the first arm of a family. If there are several box balances, the others are tried at the best rate. The choice is
    made by AP on images held out of the training set and holds for the whole family. Without alternatives there are no
    trials.

    ``flags`` are settings of every run. ``records`` are runs that were finished elsewhere, by name. ``failed`` names
    runs that ended with an error, for example because the learning rate was too high; the other trials choose without
    them. ``seconds`` per step, by row key, decide how long a row may train in the time of another one.
    """

    out: Path
    seeds: int = 1
    factors: tuple[float, ...] = (1.0,)
    flags: tuple[str, ...] = ()
    records: Mapping[str, RunRecord] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The title of tables and pages."""
        raise NotImplementedError

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All arms, in the order of the tables."""
        raise NotImplementedError

    @property
    def trial_length(self) -> float:
        """The length of a trial as a multiple of a final run."""
        return 1.0

    def usual_rate(self, arm: Arm) -> float:
        """Return the learning rate of the recipe."""
        raise NotImplementedError

    def balances(self, _arm: Arm) -> tuple[bool | None, ...]:
        """Return the box balances to try, the usual one first."""
        return (None,)

    def _build(self, arm: Arm, choice: Choice, *, seed: int, trial: bool) -> StudyRun:
        raise NotImplementedError

    def run(self, arm: Arm, choice: Choice, *, seed: int = 0, trial: bool = False) -> StudyRun:
        """Return a run, with its record if it was finished elsewhere."""
        run = self._build(arm, choice, seed=seed, trial=trial)
        record = self.records.get(run.name)
        if record is None:
            return run
        record.require_same_settings(run)
        return replace(run, record=record)

    def families(self) -> list[Arm]:
        """Return the first arm of each family; its trials choose for the others."""
        firsts: dict[tuple[object, ...], Arm] = {}
        for arm in self.arms:
            firsts.setdefault((arm.data, arm.row.family), arm)
        return list(firsts.values())

    def _first(self, arm: Arm) -> Arm:
        return next(other for other in self.arms if (other.data, other.row.family) == (arm.data, arm.row.family))

    def rates(self, arm: Arm) -> list[float]:
        """Return the learning rates to try."""
        return [float(f"{self.usual_rate(arm) * factor:.6g}") for factor in self.factors]

    @property
    def trials_per_family(self) -> int:
        """Number of trials per family; 0 if there is nothing to choose."""
        trials = len(self.factors) + len(self.balances(self.arms[0])) - 1
        return trials if trials > 1 else 0

    def rate_trials(self, arm: Arm) -> list[StudyRun]:
        """Return the runs that choose the learning rate of the arm."""
        if not self.trials_per_family:
            return []
        first = self._first(arm)
        usual, *_ = self.balances(first)
        return [self.run(first, Choice(rate, usual), trial=True) for rate in self.rates(first)]

    def trials(self, arm: Arm) -> list[StudyRun]:
        """Return all trials of the arm; those of other box balances follow once the rate is chosen."""
        by_rate = self.rate_trials(arm)
        best = self._best(by_rate)
        if best is None:
            return by_rate
        first = self._first(arm)
        others = self.balances(first)[1:]
        return [*by_rate, *(self.run(first, Choice(best.choice.rate, other), trial=True) for other in others)]

    def best_trial(self, arm: Arm) -> StudyRun | None:
        """Return the trial with the highest AP; None before all trials have ended, or without trials."""
        trials = self.trials(arm)
        return self._best(trials) if len(trials) == self.trials_per_family else None

    def _best(self, trials: Sequence[StudyRun]) -> StudyRun | None:
        """Return the finished trial with the highest AP; None before all have ended, or if all have failed.

        Of trials with the same AP, for example if none has detected anything, the rate nearest to the recipe's wins.
        """
        if not all(trial.finished or trial.name in self.failed for trial in trials):
            return None

        def order(trial: StudyRun) -> tuple[float, float]:
            ap, usual = trial.metric(), self.usual_rate(Arm(trial.row, trial.data))
            return (0.0 if math.isnan(ap) else ap), -abs(math.log(trial.choice.rate / usual))

        return max((trial for trial in trials if trial.finished), key=order, default=None)

    def chosen(self, arm: Arm) -> Choice | None:
        """Return the settings of the arm's runs; None before the trials have chosen."""
        if not self.trials_per_family:
            return Choice(self.rates(arm)[0], self.balances(arm)[0])
        best = self.best_trial(arm)
        return None if best is None else best.choice

    def runs(self, arm: Arm) -> list[StudyRun]:
        """Return the final runs, one per seed; empty before the trials have chosen."""
        choice = self.chosen(arm)
        return [] if choice is None else [self.run(arm, choice, seed=seed) for seed in range(self.seeds)]

    def first_runs(self) -> dict[str, list[StudyRun]]:
        """Return one run of each row by detector, on the first data set and at the recipe's rate, to time its steps."""
        runs: dict[str, list[StudyRun]] = {}
        for arm in self.arms:
            if arm.data == self.arms[0].data:
                choice = Choice(self.usual_rate(arm), self.balances(arm)[0])
                runs.setdefault(arm.row.detector, []).append(self.run(arm, choice))
        return runs

    def commands(self) -> list[str]:
        """Return the commands of the runs that can start now: trials, and final runs once their rate is chosen."""
        runs = [trial for arm in self.families() for trial in self.trials(arm)]
        runs += [run for arm in self.arms for run in self.runs(arm)]
        return [run.command for run in runs if run.record is None]

    @property
    def total(self) -> int:
        """The number of runs, including trials."""
        return len(self.arms) * self.seeds + len(self.families()) * self.trials_per_family

    @property
    def total_length(self) -> float:
        """The length of all runs, as a multiple of a final run."""
        return len(self.arms) * self.seeds + len(self.families()) * self.trials_per_family * self.trial_length


@dataclass(frozen=True, kw_only=True)
class PaperPlan(StudyPlan):
    """Rows of a paper table on one data set, with laptop recipes or, if ``paper``, with the paper's."""

    study: Study
    rows: tuple[Row, ...]
    data: Path
    paper: bool = False

    @property
    def title(self) -> str:
        return self.study.title

    @property
    def arms(self) -> tuple[Arm, ...]:
        return tuple(Arm(row, self.data) for row in self.rows)

    def usual_rate(self, arm: Arm) -> float:
        return load_recipe(self._recipe(arm.row), parse_flags(self.flags)).schedule.lr

    def require_init(self) -> None:
        """Raise RecipeError if a row must start from weights that the flags do not name."""
        for row in self.rows:
            require_init(load_recipe(self._recipe(row), parse_flags(self.flags)), self._recipe(row))

    def _recipe(self, row: Row) -> str:
        return str(row.paper if self.paper else row.small)

    def _build(self, arm: Arm, choice: Choice, *, seed: int, trial: bool) -> StudyRun:
        row = arm.row
        flags = (*(() if self.paper else row.flags), *self.flags, *self._longer(row))
        if trial:
            flags = (*flags, "--data.holdout", f"{HOLDOUT:g}")
        stem = f"{row.key}-lr{choice.rate:g}"
        return StudyRun(stem, row, self._recipe(row), flags, choice, seed, self.data, self.out, trial=trial)

    def _longer(self, row: Row) -> tuple[str, ...]:
        """Return the flag for the number of epochs that takes as long as the row ``like``.

        The paper's recipes need no flag: they already have these epochs.
        """
        own, other = self.seconds.get(row.key), self.seconds.get(str(row.like))
        if self.paper or own is None or other is None:
            return ()
        epochs = load_recipe(self._recipe(row), parse_flags([*row.flags, *self.flags])).schedule.epochs
        return ("--schedule.epochs", str(max(epochs, math.floor(epochs * other / own))))


@dataclass(frozen=True, kw_only=True)
class LossPlan(StudyPlan):
    """Losses compared in one detector, on one or several data sets.

    With the head ``"same"``, only the loss, the learning rate and the box balance differ. With ``"published"``, each
    loss has the head, box loss and box balance of its publication, and the trials only choose the learning rate. A
    trial has ``trial_steps`` steps, a final run ``steps``, with evaluations in between. ``choices``, by loss, were made
    by the trials of another study; there are no trials then.
    """

    data: tuple[Path, ...]
    detector: ComparedDetector
    losses: tuple[str, ...] = ONE_HEAD
    head: Head = "same"
    seeds: int = 3
    steps: int = 1000
    trial_steps: int = 125
    factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    choices: Mapping[str, Choice] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.detector.title}: losses " + ("compared in one head" if self.head == "same" else "as published")

    def arm(self, data: Path, loss: str) -> Arm:
        """Return the arm of a loss on a data set."""
        return Arm(Row(self.detector.title, loss, small=self.detector.recipe), data)

    @property
    def arms(self) -> tuple[Arm, ...]:
        return tuple(self.arm(data, loss) for data in self.data for loss in self.losses)

    @property
    def trial_length(self) -> float:
        return self.trial_steps / self.steps

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the detector with the flags of all runs."""
        return load_recipe(self.detector.recipe, parse_flags(self.flags))

    def usual_rate(self, _arm: Arm) -> float:
        return self.recipe.schedule.lr

    @property
    def trials_per_family(self) -> int:
        return 0 if self.choices else super().trials_per_family

    def chosen(self, arm: Arm) -> Choice | None:
        return self.choices[arm.row.loss] if self.choices else super().chosen(arm)

    def balances(self, arm: Arm) -> tuple[bool | None, ...]:
        usual = arm.row.loss in BALANCED
        return (usual, not usual) if self.head == "same" else (None,)

    def require_data(self) -> None:
        """Raise DataError unless every data set has training and validation images and a unique name."""
        names = [data.name for data in self.data]
        if len({*names}) < len(names):
            raise DataError(f"--data: expected folders with different names, got {', '.join(names)}; rename one")
        for data in self.data:
            if find_splits(data, layout=self.recipe.data.chosen_layout).val is None:
                raise DataError(f"{data}: expected validation images, got none; see docs/data.md for layouts")
            _training_images(data, self.recipe.data.chosen_layout)

    def _build(self, arm: Arm, choice: Choice, *, seed: int, trial: bool) -> StudyRun:
        steps = self.trial_steps if trial else self.steps
        balance = () if choice.balanced is None else ("--loss.box_balance", str(choice.balanced).lower())
        flags = (
            *("--loss", arm.row.loss),
            *((*self.detector.same_head, *balance) if balance else ()),
            *("--schedule.max_steps", str(steps), "--schedule.epochs", str(steps)),
            *("--trainer.validate_every", str(NEVER if trial else self._epochs_between_evaluations(arm.data))),
            *("--trainer.pictures", "0", "--trainer.calibrate", "false"),
            *(("--data.holdout", f"{HOLDOUT:g}") if trial else ("--trainer.keep_detections", "true")),
            *self.flags,
        )
        stem = f"{arm.data.name}-{arm.row.loss}-lr{choice.rate:g}-{choice.boxes}"
        length = self.trial_length if trial else 1.0
        recipe = self.detector.recipe
        return StudyRun(stem, arm.row, recipe, flags, choice, seed, arm.data, self.out, trial=trial, length=length)

    def _epochs_between_evaluations(self, data: Path) -> int:
        images = _training_images(data, self.recipe.data.chosen_layout)
        return max(1, round(self.steps / EVALUATIONS / math.ceil(images / self.recipe.data.batch_size)))


def read_choices(file: Path, data: str) -> dict[str, Choice]:
    """Read the settings that the trials of another study chose on a data set, by loss; StudyError if there are none."""
    try:
        sets = json.loads(file.read_text(encoding="utf-8"))["sets"]
        found = {each["data"]: each["losses"] for each in sets}
        if data not in found:
            raise StudyError(f"--rates-of: {file}: expected a set among {', '.join(found)}, got {data!r}")
        balances = {"balanced": True, "fixed": False, "published": None}
        return {each["loss"]: Choice(float(each["lr"]), balances[each["boxes"]]) for each in found[data]}
    except OSError as error:
        raise StudyError(f"--rates-of: {file}: cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, ValueError) as error:
        raise StudyError(f"--rates-of: {file}: expected the losses.json of a study, got something else") from error


@cache
def _training_images(data: Path, layout: str | None) -> int:
    split = find_splits(data, layout=layout).train
    if split is None:
        raise DataError(f"{data}: expected training images, got none; see docs/data.md for layouts")
    return len(split.read()["images"])


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
