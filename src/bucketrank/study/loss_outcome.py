"""The results of the study ``losses``: curves, differences with intervals, and how soon a loss nears the best AP."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from bucketrank.data import find_splits
from bucketrank.evaluation import BootstrapAP, Difference, Evaluator, ImageAP, paired_difference
from bucketrank.evaluation.evaluator import IouType
from bucketrank.settings.training import DataSettings
from bucketrank.study.loss_comparison import OURS, RIVALS, LossComparison, LossRun
from bucketrank.study.run_record import RunRecord
from bucketrank.study.study_results import SeedMean
from bucketrank.study.study_run import StudyError

SHARES = (0.5, 0.8, 0.95)  # of the best AP of any loss
QUARTER = 0.25  # of the budget


@dataclass(frozen=True)
class LossResult:
    """One loss on one data set: the chosen settings and its finished runs."""

    loss: str
    rate: float
    balanced: bool | None
    runs: tuple[LossRun, ...]

    def curve(self) -> tuple[list[int], list[list[float]]]:
        """Return the steps of the evaluations and the AP of each run at each of them."""
        curves = [run.curve() for run in self.runs]
        return curves[0][0], [values for _, values in curves]

    def box_curves(self) -> list[list[float]]:
        """Return the AP of each run's boxes at each evaluation of a detector with masks; empty without masks."""
        curves = [run.box_curve() for run in self.runs]
        return curves if all(curves) else []

    def mean(self, metric: str = "AP") -> SeedMean:
        """Return the mean of a metric over the seeds at the end."""
        return SeedMean.of([run.metric(metric) for run in self.runs])

    def mean_at(self, share: float) -> tuple[int, float]:
        """Return the evaluation step nearest to a share of the budget, and the mean AP there."""
        steps, values = self.curve()
        step = step_at(steps, share)
        return step, float(np.mean([run[steps.index(step)] for run in values]))

    def class_ap(self) -> dict[str, float]:
        """Return the mean AP of each class over the seeds at the end; empty if a run's record has none."""
        by_run = [record_of(run).class_ap for run in self.runs]
        return {name: float(np.mean([each[name] for each in by_run])) for name in by_run[0]} if all(by_run) else {}

    def steps_to(self, ap: float) -> float | None:
        """Return the step at which the mean curve first reaches ``ap``, interpolated; None if it never does."""
        if not ap > 0:  # no loss has detected anything
            return None
        steps, values = self.curve()
        xs, ys = [0, *steps], [0.0, *np.mean(values, axis=0)]
        for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:], strict=False):
            if y1 >= ap:
                return x0 + (x1 - x0) * (ap - y0) / (y1 - y0) if y1 > y0 else float(x1)
        return None


@dataclass(frozen=True)
class SetOutcome:
    """All losses on one data set; ``usual`` is the loss that the detector is usually trained with."""

    data: Path
    results: tuple[LossResult, ...]
    usual: str

    def of(self, loss: str) -> LossResult | None:
        """Return the result of a loss; None if it has no finished run."""
        return next((result for result in self.results if result.loss == loss), None)

    @property
    def best_ap(self) -> float:
        """The highest mean AP of any loss at any evaluation."""
        return max(float(np.mean(result.curve()[1], axis=0).max()) for result in self.results)

    def best_rival(self) -> LossResult | None:
        """Return the rival with the highest mean AP at the end, among those with the most seeds."""
        rivals = [result for result in self.results if result.loss in RIVALS]
        return max(rivals, key=lambda result: (len(result.runs), result.mean().mean), default=None)

    def differences(self, share: float, *, boxes: bool = False) -> dict[str, Difference]:
        """Return the difference of RS to each other loss at a share of the budget, over the seeds that both have.

        It is that of the masks if the detector has them, or of its boxes with ``boxes``.
        """
        return _differences(self, share, boxes)

    @property
    def steps_of_masks_and_boxes(self) -> list[int]:
        """The evaluations at which all runs have bootstrap draws of masks and of boxes; none without masks."""
        if not all(result.box_curves() for result in self.results):
            return []
        steps = self.results[0].curve()[0]
        records = [run.record for result in self.results for run in result.runs if run.record is not None]
        return [step for step in steps if all(step in record.box_bootstrap for record in records)]

    @property
    def compared(self) -> list[str]:
        """The losses of the headline: the usual loss and the best rival, as far as they are finished."""
        best = self.best_rival()
        return [loss for loss in (self.usual, best.loss if best else None) if loss is not None and self.of(loss)]


def collect_losses(plan: LossComparison) -> list[SetOutcome]:
    """Collect the finished runs of the comparison; data sets without any are left out."""
    outcomes = []
    for data in plan.data:
        results = []
        for loss in plan.losses:
            best = plan.chosen(data, loss)
            finished = tuple(run for run in plan.runs(data, loss) if run.finished)
            if best is not None and finished:
                results.append(LossResult(loss, best.rate, best.balanced, finished))
        if results:
            outcomes.append(SetOutcome(data, tuple(results), plan.detector.usual))
    return outcomes


@cache  # the tables ask for the same differences, and each takes hundreds of evaluations
def _differences(outcome: SetOutcome, share: float, boxes: bool) -> dict[str, Difference]:  # noqa: FBT001 (a key of the cache)
    ours = outcome.of(OURS)
    if ours is None:
        return {}
    own = {run.seed: bootstrap_at(run, share, boxes=boxes) for run in ours.runs}
    differences = {}
    for other in outcome.results:
        theirs = {run.seed: bootstrap_at(run, share, boxes=boxes) for run in other.runs if run.seed in own}
        if other.loss != OURS and theirs:
            differences[other.loss] = paired_difference([own[seed] for seed in theirs], list(theirs.values()))
    return differences


def step_at(steps: list[int], share: float) -> int:
    """Return the evaluation step nearest to a share of the last."""
    return min(steps, key=lambda step: abs(step - share * steps[-1]))


def bootstrap_at(run: LossRun, share: float, *, boxes: bool = False) -> BootstrapAP:
    """Return the AP of a run in the draws of the images, after a share of its steps.

    It is that of the masks if the detector has them, or of its boxes with ``boxes``.
    """
    step = step_at(run.curve()[0], share)
    if run.record is None:
        return _bootstrap(run.detections(step), run.data, run.load().data, boxes)
    draws = run.record.box_bootstrap if boxes else run.record.bootstrap
    if step not in draws:
        raise StudyError(f"--merge: {run.name}: expected bootstrap draws after step {step}, got none; train it again")
    return draws[step]


def record_of(run: LossRun) -> RunRecord:
    """Return the record of a finished run: that from elsewhere, or one made from its folder."""
    if run.record is not None:
        return run.record
    if run.trial:
        return RunRecord.of(run)
    steps = run.curve()[0]
    class_ap = _class_ap(run.detections(steps[-1]), run.data, run.load().data)
    if not run.box_curve():
        bootstrap = {step_at(steps, share): bootstrap_at(run, share) for share in (QUARTER, 1.0)}
        return RunRecord.of(run, bootstrap, class_ap)
    # The page compares masks and boxes at every evaluation.
    masks, boxes = (
        {step: bootstrap_at(run, step / steps[-1], boxes=boxes) for step in steps} for boxes in (False, True)
    )
    return RunRecord.of(run, masks, class_ap, boxes)


@lru_cache(maxsize=256)
def _bootstrap(detections: Path, data: Path, settings: DataSettings, boxes: bool) -> BootstrapAP:  # noqa: FBT001 (a key of the cache)
    evaluator, iou_type = _evaluator(detections, data, settings)
    return BootstrapAP.of(ImageAP.of(evaluator, "boxes" if boxes else iou_type))


@lru_cache(maxsize=256)
def _class_ap(detections: Path, data: Path, settings: DataSettings) -> dict[str, float]:
    evaluator, iou_type = _evaluator(detections, data, settings)
    per_class = evaluator.result(iou_type).per_class
    return {name: 100 * ap for name, ap in per_class.items() if not math.isnan(ap)}  # NaN: no object to find


def _evaluator(detections: Path, data: Path, settings: DataSettings) -> tuple[Evaluator, IouType]:
    """Return an evaluator with the detections of a file, and what its AP is of: masks if there are any, or boxes.

    It has the rules of the run that the settings are of.
    """
    split = find_splits(data, layout=settings.chosen_layout).val
    if split is None:
        raise FileNotFoundError(f"{data}: there are no validation images")
    records = json.loads(detections.read_text(encoding="utf-8"))
    masks = any("segmentation" in record for record in records)  # their AP is the one that the tables show
    evaluator = Evaluator(split, masks=masks, style=settings.style)
    evaluator.add_records(records)
    return evaluator, "masks" if masks else "boxes"
