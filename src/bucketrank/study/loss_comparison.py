"""The study ``losses``: detectors that differ by the loss alone, with a protocol that never tunes on reported images.

For each data set and loss, short trials on the training images choose the learning rate and how boxes are weighted, by
the AP on images that are held out of the training set. All losses have the same number of trials. Then each loss is
trained with every seed for a fixed number of steps, and evaluated on the validation images at fixed steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bucketrank.data import DataError, find_splits
from bucketrank.recipes import load_recipe
from bucketrank.study.grid import Row
from bucketrank.study.study_run import StudyRun

RECIPE = "atss-laptop"
TITLES = {
    "rs": "RS",
    "rsq": "RS + QFL",
    "ap": "AP",
    "focal": "focal",
    "qfl": "QFL",
    "vfl": "VFL",
    "bce": "BCE, IoU targets",
}
OURS, USUAL = "rs", "focal"  # the loss under test, and the loss that this detector is usually trained with
RIVALS = ("qfl", "vfl", "bce")  # score-based losses that see the IoU, as RS does
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

    ``factors`` of the recipe's learning rate are tried for ``trial_steps`` steps, each with boxes of fixed weight and
    with boxes balanced to the classification loss. ``holdout`` is the share of the training images that judges trials.
    """

    data: tuple[Path, ...]
    out: Path
    losses: tuple[str, ...] = tuple(TITLES)
    seeds: int = 3
    steps: int = 1000
    trial_steps: int = 250
    factors: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    holdout: float = 0.2
    flags: tuple[str, ...] = ()

    @property
    def rates(self) -> list[float]:
        """The learning rates to try."""
        usual = load_recipe(RECIPE, list(self.flags)).schedule.lr
        return [float(f"{usual * factor:.6g}") for factor in self.factors]

    def trials(self, data: Path, loss: str) -> list[LossRun]:
        """Return the runs that choose learning rate and box weighting of a loss on a data set."""
        held_out = ("--data.holdout", f"{self.holdout:g}")
        return [
            self._run(data, loss, rate, balanced=balanced, steps=self.trial_steps, extra=held_out, trial=True)
            for balanced in (False, True)
            for rate in self.rates
        ]

    def chosen(self, data: Path, loss: str) -> LossRun | None:
        """Return the trial with the highest AP on held-out images; None before all trials are finished."""
        trials = self.trials(data, loss)
        if not all(trial.finished for trial in trials):
            return None
        return max(trials, key=lambda trial: -math.inf if math.isnan(trial.metric()) else trial.metric())

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
    def total(self) -> int:
        """The number of all runs."""
        return len(self.data) * len(self.losses) * (2 * len(self.factors) + self.seeds)

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
        split = find_splits(data).train
        if split is None:
            raise DataError(f"{data}: expected training images, got none; see docs/data.md for layouts")
        recipe = load_recipe(RECIPE, list(self.flags))
        steps_per_epoch = math.ceil(len(split.read()["images"]) / recipe.data.batch_size)
        return max(1, round(steps / EVALUATIONS / steps_per_epoch))
