"""The study ``losses``: one detector with several losses, by a protocol that never tunes on reported images.

For each data set and loss, short trials on the training images choose the learning rate and then the balance of the
boxes, by the AP on images that are held out of the training set. All losses have the same number of trials. Then each
loss is trained with every seed for a fixed number of steps, and evaluated on the validation images at fixed steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from bucketrank.data import find_splits
from bucketrank.errors import DataError
from bucketrank.settings import Recipe, load_recipe
from bucketrank.study.grid import Row
from bucketrank.study.run_record import RunRecord
from bucketrank.study.study_run import HOLDOUT, StudyRun

TITLES = {
    "rs": "RS",
    "focal": "focal",
    "ce": "cross-entropy",
    "qfl": "QFL",
    "vfl": "VFL",
    "bce": "soft BCE",
    "mal": "MAL",
    "iabce": "IoU-aware BCE",
    "rsq": "RS + QFL",
    "ap": "AP",
    "dr": "DR",
    "alrp": "aLRP",
}
OURS = "rs"  # the loss under test
RIVALS = ("qfl", "vfl", "bce", "mal", "iabce")  # score-based losses that see the IoU, as RS does
BALANCED = ("rs", "rsq")  # losses whose papers balance the box loss; the others give it a fixed weight
Head = Literal["same", "published"]
ONE_HEAD = ("rs", "focal", "qfl", "vfl", "bce", "rsq", "ap")  # compared in one head
SAME_BOXES = ("--loss.box_loss", "giou", "--loss.box_confidence", "true")


@dataclass(frozen=True)
class ComparedDetector:
    """A detector of the comparison.

    ``usual`` is the loss that it is usually trained with. ``same_head`` are the flags that give every loss the same
    head and box loss; a detector without them is compared as published only. ``losses`` are compared by default.
    """

    title: str
    recipe: str
    usual: str
    same_head: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()

    def default_losses(self, head: Head) -> tuple[str, ...]:
        """Return the losses that are compared unless others are asked for."""
        return self.losses or (ONE_HEAD if head == "same" else (OURS, self.usual))


DETECTORS = {
    detector.recipe: detector
    for detector in (
        ComparedDetector(
            "ATSS",
            "atss-laptop",
            "focal",
            ("--detector.anchors", "3", "--detector.quality_branch", "false", *SAME_BOXES),
        ),
        ComparedDetector("RetinaNet", "retinanet-laptop", "focal", ("--detector.scales", "3", *SAME_BOXES)),
        ComparedDetector("PAA", "paa-laptop", "focal"),
        ComparedDetector("Faster R-CNN", "faster-rcnn-laptop", "ce"),
        ComparedDetector("Cascade R-CNN", "cascade-rcnn-laptop", "ce"),
        ComparedDetector("Mask R-CNN", "mask-rcnn-laptop", "ce"),
        ComparedDetector("Co-DETR", "brs-detr-laptop", "focal", losses=("rs", "focal", "vfl", "mal")),
    )
}
EVALUATIONS = 10  # approximate number per final run
NEVER = 1_000_000  # epochs between evaluations: a trial is evaluated at its end alone


@dataclass(frozen=True)
class LossRun(StudyRun):
    """A run of the comparison: a trial, or a final run with a seed.

    A run with a record was finished elsewhere. It is not trained again, and its results are those of the record.
    """

    balanced: bool | None = None  # None: as published
    record: RunRecord | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return f"{self.data.name}-{self.row.loss}-lr{self.rate:g}-{balance_name(self.balanced)}-{self.ending}"

    def detections(self, step: int) -> Path:
        """Return the file with the detections of the evaluation after ``step``."""
        return self.folder / "detections" / f"{step}.json"

    @property
    def finished(self) -> bool:
        return self.record is not None or super().finished

    def metric(self, name: str = "AP") -> float:
        return super().metric(name) if self.record is None else self.record.metrics[name]

    def curve(self) -> tuple[list[int], list[float]]:
        return super().curve() if self.record is None else self.record.curve

    def box_curve(self) -> list[float]:
        return super().box_curve() if self.record is None else self.record.box_curve


def balance_name(balanced: bool | None) -> str:  # noqa: FBT001 (the one argument of a name)
    """Return the name of a box balance, for tables and folders."""
    return "published" if balanced is None else "balanced" if balanced else "fixed"


@dataclass(frozen=True)
class LossComparison:
    """The plan of the comparison.

    With the head ``"same"``, nothing differs but the loss, the learning rate and the box balance. With
    ``"published"``, each loss has the head, box loss and box balance of its publication, and the trials choose the
    learning rate alone.

    ``factors`` of the recipe's learning rate are tried for ``trial_steps`` steps, with the box balance of the loss's
    paper; one more trial has the best rate and the other balance. ``holdout`` is the share of the training images
    that judges trials. ``records`` are runs that were finished elsewhere, by name. ``failed`` are the names of runs
    that ended with an error, for example because the learning rate was too high; the other trials choose without them.
    """

    data: tuple[Path, ...]
    out: Path
    losses: tuple[str, ...] = ONE_HEAD
    detector: ComparedDetector = DETECTORS["atss-laptop"]
    head: Head = "same"
    seeds: int = 3
    steps: int = 1000
    trial_steps: int = 125
    factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    holdout: float = HOLDOUT
    flags: tuple[str, ...] = ()
    records: Mapping[str, RunRecord] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()

    def require_data(self) -> None:
        """Raise DataError unless every data set has training and validation images and a name of its own."""
        names = [data.name for data in self.data]
        if len({*names}) < len(names):
            raise DataError(f"--data: expected folders with different names, got {', '.join(names)}; rename one")
        for data in self.data:
            if find_splits(data, layout=self.recipe.data.chosen_layout).val is None:
                raise DataError(f"{data}: expected validation images, got none; see docs/data.md for layouts")
            _training_images(data, self.recipe.data.chosen_layout)

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the detector with the flags of all runs."""
        return load_recipe(self.detector.recipe, list(self.flags))

    @property
    def rates(self) -> list[float]:
        """The learning rates to try."""
        usual = self.recipe.schedule.lr
        return [float(f"{usual * factor:.6g}") for factor in self.factors]

    def rate_trials(self, data: Path, loss: str) -> list[LossRun]:
        """Return the runs that choose the learning rate of a loss on a data set."""
        return [self._trial(data, loss, rate, balanced=self._usual_balance(loss)) for rate in self.rates]

    def trials(self, data: Path, loss: str) -> list[LossRun]:
        """Return all trials of a loss; the one with the other box balance follows once the rate is chosen."""
        by_rate = self.rate_trials(data, loss)
        best = self._best(by_rate)
        if self.head == "published" or best is None:
            return by_rate
        return [*by_rate, self._trial(data, loss, best.rate, balanced=not best.balanced)]

    def chosen(self, data: Path, loss: str) -> LossRun | None:
        """Return the trial with the highest AP on held-out images; None before all trials have ended."""
        trials = self.trials(data, loss)
        return self._best(trials) if len(trials) == self.trials_per_loss else None

    def _best(self, trials: Sequence[LossRun]) -> LossRun | None:
        """Return the finished trial with the highest AP; None before all have ended, or if all have failed.

        Of trials with the same AP, as if none has detected anything, the one nearest to the recipe's rate is the best.
        """
        if not all(trial.finished or trial.name in self.failed for trial in trials):
            return None
        usual = self.recipe.schedule.lr

        def order(trial: LossRun) -> tuple[float, float]:
            ap = trial.metric()
            return (0.0 if math.isnan(ap) else ap), -abs(math.log(trial.rate / usual))

        return max((trial for trial in trials if trial.finished), key=order, default=None)

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

    def first_runs(self) -> list[LossRun]:
        """Return one run of each loss, on the first data set and with the recipe's rate, whose steps are timed."""
        usual = self.recipe.schedule.lr
        return [self._trial(self.data[0], loss, usual, balanced=self._usual_balance(loss)) for loss in self.losses]

    @property
    def trials_per_loss(self) -> int:
        """The number of trials of each loss on each data set."""
        return len(self.factors) + (self.head == "same")

    @property
    def total(self) -> int:
        """The number of all runs."""
        return len(self.data) * len(self.losses) * (self.trials_per_loss + self.seeds)

    @property
    def total_length(self) -> float:
        """The steps of all runs, in multiples of those of a final run."""
        trials = self.trials_per_loss * self.trial_steps / self.steps
        return len(self.data) * len(self.losses) * (trials + self.seeds)

    def _usual_balance(self, loss: str) -> bool | None:
        return loss in BALANCED if self.head == "same" else None

    def _trial(self, data: Path, loss: str, rate: float, *, balanced: bool | None) -> LossRun:
        held_out = ("--data.holdout", f"{self.holdout:g}")
        return self._run(data, loss, rate, balanced=balanced, steps=self.trial_steps, extra=held_out, trial=True)

    def _run(
        self,
        data: Path,
        loss: str,
        rate: float,
        *,
        balanced: bool | None,
        steps: int,
        extra: Sequence[str],
        seed: int = 0,
        trial: bool = False,
    ) -> LossRun:
        same = () if balanced is None else (*self.detector.same_head, "--loss.box_balance", str(balanced).lower())
        flags = (
            *("--loss", loss, *same),
            *("--schedule.max_steps", str(steps), "--schedule.epochs", str(steps)),
            *("--trainer.validate_every", str(NEVER if trial else self._epochs_between_evaluations(data, steps))),
            *("--trainer.pictures", "0", "--trainer.calibrate", "false"),
            *extra,
            *self.flags,
        )
        row = Row(self.detector.title, loss, small=self.detector.recipe)
        settings = (row, self.detector.recipe, flags, rate, seed, data, self.out)
        run = LossRun(*settings, balanced=balanced, length=steps / self.steps, trial=trial)
        record = self.records.get(run.name)
        if record is None:
            return run
        record.require_same_settings(run)
        return replace(run, record=record)

    def _epochs_between_evaluations(self, data: Path, steps: int) -> int:
        images = _training_images(data, self.recipe.data.chosen_layout)
        return max(1, round(steps / EVALUATIONS / math.ceil(images / self.recipe.data.batch_size)))


@cache
def _training_images(data: Path, layout: str | None) -> int:
    split = find_splits(data, layout=layout).train
    if split is None:
        raise DataError(f"{data}: expected training images, got none; see docs/data.md for layouts")
    return len(split.read()["images"])
