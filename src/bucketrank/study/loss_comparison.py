"""The study ``losses``: detectors that differ by the loss alone, with a protocol that never tunes on reported images.

For each data set and loss, short trials on the training images choose the learning rate and then the weighting of the
boxes, by the AP on images that are held out of the training set. All losses have the same number of trials. Then each
loss is trained with every seed for a fixed number of steps, and evaluated on the validation images at fixed steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bucketrank.data import DataError, find_splits
from bucketrank.recipes import load_recipe
from bucketrank.study.grid import Row
from bucketrank.study.study_run import StudyRun

RECIPE = "atss-laptop"
TITLES = {
    "rs": "RS",
    "focal": "focal",
    "qfl": "QFL",
    "vfl": "VFL",
    "bce": "BCE, IoU targets",
    "rsq": "RS + QFL",
    "ap": "AP",
}
OURS, USUAL = "rs", "focal"  # the loss under test, and the loss that this detector is usually trained with
RIVALS = ("qfl", "vfl", "bce")  # score-based losses that see the IoU, as RS does
BALANCED = ("rs", "rsq", "ap")  # losses whose papers balance the box loss; the others give it a fixed weight
SAME_HEAD = (
    *("--detector.anchors", "3", "--detector.quality_branch", "false"),
    *("--loss.box_loss", "giou", "--loss.box_confidence", "true"),
)
EVALUATIONS = 10  # approximate number per final run
NEVER = 1_000_000  # epochs between evaluations: a trial is evaluated at its end alone


@dataclass(frozen=True)
class LossRun(StudyRun):
    """A run of the comparison: a trial, or a final run with a seed."""

    balanced: bool = False
    trial: bool = False

    @property
    def name(self) -> str:
        boxes = "balanced" if self.balanced else "fixed"
        ending = "trial" if self.trial else f"seed{self.seed}"
        return f"{self.data.name}-{self.row.loss}-lr{self.rate:g}-{boxes}-{ending}"

    def detections(self, step: int) -> Path:
        """Return the file with the detections of the evaluation after ``step``."""
        return self.folder / "detections" / f"{step}.json"


@dataclass(frozen=True)
class LossComparison:
    """The plan of the comparison.

    ``factors`` of the recipe's learning rate are tried for ``trial_steps`` steps, with the box weighting of the loss's
    paper; one more trial has the best rate and the other weighting. ``holdout`` is the share of the training images
    that judges trials.
    """

    data: tuple[Path, ...]
    out: Path
    losses: tuple[str, ...] = tuple(TITLES)
    seeds: int = 3
    steps: int = 1000
    trial_steps: int = 125
    factors: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    holdout: float = 0.2
    flags: tuple[str, ...] = ()

    @property
    def rates(self) -> list[float]:
        """The learning rates to try."""
        usual = load_recipe(RECIPE, list(self.flags)).schedule.lr
        return [float(f"{usual * factor:.6g}") for factor in self.factors]

    def rate_trials(self, data: Path, loss: str) -> list[LossRun]:
        """Return the runs that choose the learning rate of a loss on a data set."""
        return [self._trial(data, loss, rate, balanced=loss in BALANCED) for rate in self.rates]

    def trials(self, data: Path, loss: str) -> list[LossRun]:
        """Return all trials of a loss; the one with the other box weighting follows once the rate is chosen."""
        by_rate = self.rate_trials(data, loss)
        if not all(trial.finished for trial in by_rate):
            return by_rate
        best = _best(by_rate)
        return [*by_rate, self._trial(data, loss, best.rate, balanced=not best.balanced)]

    def chosen(self, data: Path, loss: str) -> LossRun | None:
        """Return the trial with the highest AP on held-out images; None before all trials are finished."""
        trials = self.trials(data, loss)
        complete = len(trials) == self.trials_per_loss and all(trial.finished for trial in trials)
        return _best(trials) if complete else None

    def runs(self, data: Path, loss: str) -> list[LossRun]:
        """Return the final runs, one per seed; empty before the trials have chosen."""
        best = self.chosen(data, loss)
        if best is None:
            return []
        kept = ("--trainer.keep_detections", "true")
        return [
            self._run(data, loss, best.rate, balanced=best.balanced, steps=self.steps, extra=kept, seed=seed)
            for seed in range(self.seeds)
        ]

    @property
    def trials_per_loss(self) -> int:
        """The number of trials of each loss on each data set."""
        return len(self.factors) + 1

    @property
    def total(self) -> int:
        """The number of all runs."""
        return len(self.data) * len(self.losses) * (self.trials_per_loss + self.seeds)

    def _trial(self, data: Path, loss: str, rate: float, *, balanced: bool) -> LossRun:
        held_out = ("--data.holdout", f"{self.holdout:g}")
        return self._run(data, loss, rate, balanced=balanced, steps=self.trial_steps, extra=held_out, trial=True)

    def _run(
        self,
        data: Path,
        loss: str,
        rate: float,
        *,
        balanced: bool,
        steps: int,
        extra: Sequence[str],
        seed: int = 0,
        trial: bool = False,
    ) -> LossRun:
        flags = (
            *("--loss", loss, *SAME_HEAD, "--loss.box_balance", str(balanced).lower()),
            *("--schedule.max_steps", str(steps), "--schedule.epochs", str(steps)),
            *("--trainer.validate_every", str(NEVER if trial else self._epochs_between_evaluations(data, steps))),
            *("--trainer.pictures", "0", "--trainer.calibrate", "false"),
            *extra,
            *self.flags,
        )
        row = Row("ATSS", loss, small=RECIPE)
        return LossRun(row, RECIPE, flags, rate, seed, data, self.out, balanced=balanced, trial=trial)

    def _epochs_between_evaluations(self, data: Path, steps: int) -> int:
        batch_size = load_recipe(RECIPE, list(self.flags)).data.batch_size
        return max(1, round(steps / EVALUATIONS / math.ceil(_training_images(data) / batch_size)))


def _best(trials: Sequence[LossRun]) -> LossRun:
    return max(trials, key=lambda trial: -math.inf if math.isnan(trial.metric()) else trial.metric())


@cache
def _training_images(data: Path) -> int:
    split = find_splits(data).train
    if split is None:
        raise DataError(f"{data}: expected training images, got none; see docs/data.md for layouts")
    return len(split.read()["images"])
