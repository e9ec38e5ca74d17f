"""The study ``losses``: AP curves, differences with intervals, and how soon each loss nears the best AP.

The results become a page with a headline table, a table of all losses, and figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.documents import markdown_table
from benchmarks.figures import LOSS_COLOURS, save_figure
from benchmarks.study.grid import LOSS_TITLES, OURS, RIVALS
from benchmarks.study.plan import HOLDOUT, LossPlan
from benchmarks.study.runs import Choice, RunRecord, StudyError, StudyRun
from benchmarks.study.steps import StepMeasurements
from benchmarks.study.tables import DASH, SeedMean, with_deviation
from benchmarks.timing import ratio
from bucketrank.data import find_splits
from bucketrank.evaluation import BootstrapAP, Difference, Evaluator, ImageAP, paired_difference
from bucketrank.evaluation.evaluator import IouType
from bucketrank.output import STYLE
from bucketrank.settings.training import DataSettings
from bucketrank.weights.atomic import write_text

SHARES = (0.5, 0.8, 0.95)  # fractions of the best AP of any loss
QUARTER = 0.25  # fraction of the steps


@dataclass(frozen=True)
class LossResult:
    """One loss on one data set: the chosen settings and its finished runs."""

    loss: str
    choice: Choice
    runs: tuple[StudyRun, ...]

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
        """Return the evaluation step nearest to a fraction of the budget, and the mean AP there."""
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
        """Compute the AP difference of RS to each other loss at a fraction of the budget, over their common seeds.

        It is the mask AP if the detector has masks, or the box AP with ``boxes``.
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


def collect_losses(plan: LossPlan) -> list[SetOutcome]:
    """Collect the finished runs of the comparison; data sets without any are left out."""
    outcomes = []
    for data in plan.data:
        results = []
        for loss in plan.losses:
            finished = tuple(run for run in plan.runs(plan.arm(data, loss)) if run.finished)
            if finished:
                results.append(LossResult(loss, finished[0].choice, finished))
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
    """Return the evaluation step nearest to a fraction of the last."""
    return min(steps, key=lambda step: abs(step - share * steps[-1]))


def bootstrap_at(run: StudyRun, share: float, *, boxes: bool = False) -> BootstrapAP:
    """Compute a run's AP in the bootstrap draws of the images, at a fraction of its steps.

    It is the mask AP if the detector has masks, or the box AP with ``boxes``.
    """
    step = step_at(run.curve()[0], share)
    if run.record is None:
        return _bootstrap(run.detections(step), run.data, run.load().data, boxes)
    draws = run.record.box_bootstrap if boxes else run.record.bootstrap
    if step not in draws:
        raise StudyError(f"--merge: {run.name}: expected bootstrap draws after step {step}, got none; train it again")
    return draws[step]


def record_of(run: StudyRun) -> RunRecord:
    """Return the record of a finished run, merged or made from its folder."""
    if run.record is not None:
        return run.record
    steps = run.curve()[0]
    if run.trial or not run.detections(steps[-1]).is_file():
        return RunRecord.of(run)
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
    """Build an evaluator with the detections in a file; also return whether its AP is that of masks or boxes.

    It evaluates by the rules in the run's settings.
    """
    split = find_splits(data, layout=settings.chosen_layout).val
    if split is None:
        raise FileNotFoundError(f"{data}: there are no validation images")
    records = json.loads(detections.read_text(encoding="utf-8"))
    masks = any("segmentation" in record for record in records)  # the tables show mask AP if there are masks
    evaluator = Evaluator(split, masks=masks, style=settings.style)
    evaluator.add_records(records)
    return evaluator, "masks" if masks else "boxes"


PANEL = (4.2, 3.4)  # width and height in inches


def write_losses(
    plan: LossPlan,
    outcomes: Sequence[SetOutcome],
    timed: StepMeasurements | None = None,
    *,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write ``losses.md``, ``losses.json`` and the figures; ``failed`` are the errors of runs that failed, by name."""
    plan.out.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, figure in (
            ("ap_over_steps", _panels(outcomes, _over_steps)),
            ("ap_over_rates", _rates(plan)),
        ):
            if figure is not None:
                save_figure(figure, plan.out, name)
    write_text(plan.out / "losses.md", to_markdown(plan, outcomes, timed, failed=failed))
    write_text(plan.out / "losses.json", json.dumps(to_json(plan, outcomes, timed), separators=(",", ":")) + "\n")


def to_markdown(
    plan: LossPlan,
    outcomes: Sequence[SetOutcome],
    timed: StepMeasurements | None = None,
    *,
    failed: Mapping[str, str] | None = None,
) -> str:
    """Return the page; ``failed`` are the errors of the runs that failed, by name."""
    lines = [f"# {plan.title}", "", _protocol(plan), ""]
    headline = [row for outcome in outcomes for row in headline_rows(outcome)]
    names = ["data", "RS minus", "at a quarter", "verdict", "at the end", "verdict"]
    if outcomes:
        lines += ["![AP over steps](ap_over_steps.svg)", "", markdown_table(names, headline), ""]
    for outcome in outcomes:
        quarter = f"At a quarter: the nearest evaluation, after {outcome.results[0].mean_at(QUARTER)[0]:,} steps."
        lines += [f"## {outcome.data.name}", "", markdown_table(COLUMNS, loss_rows(outcome)), "", quarter, ""]
        if steps := mask_and_box_rows(outcome):
            lines += ["AP of masks and of boxes:", "", markdown_table(mask_and_box_columns(outcome), steps), ""]
        if classes := class_names(outcome):
            lines += ["AP by class:", "", markdown_table(["loss", *classes], class_rows(outcome)), ""]
    trials = [trial for arm in plan.families() for trial in plan.trials(arm)]
    if any(trial.finished for trial in trials):
        lines += ["![AP over learning rates](ap_over_rates.svg)", ""]
    lines += _blind_losses(plan)
    if timed is not None:
        usual = LOSS_TITLES[plan.detector.usual]
        columns = [*STEP_COLUMNS, f"ratio to {usual}"]
        lines += ["## Seconds per step", "", markdown_table(columns, step_rows(plan, timed)), ""]
    if failed:
        lines += ["## Failed", "", *(f"- {name}: {error}" for name, error in failed.items()), ""]
    missing = plan.total - sum(len(result.runs) for outcome in outcomes for result in outcome.results)
    missing -= sum(trial.finished for trial in trials)
    return "\n".join(
        [*lines, f"Not complete: {missing} of {plan.total} runs are not finished.", ""] if missing else lines
    )


def _blind_losses(plan: LossPlan) -> list[str]:
    """Write a line for each loss whose trials detected nothing, so its learning rate was not chosen by AP."""
    lines = []
    for arm in plan.families():
        best = plan.best_trial(arm)
        if best is not None and not best.metric() > 0:
            lines += [
                f"No trial of {LOSS_TITLES[arm.row.loss]} on {arm.data.name} detected an object, so its learning rate "
                "is the one nearest to the recipe's. Give more --trial-steps.",
                "",
            ]
    return lines


def _protocol(plan: LossPlan) -> str:
    rates = ", ".join(f"{rate:g}" for rate in plan.rates(plan.arms[0]))
    trials = (
        f"(of {rates}) {{chosen}}: the best of {plan.trials_per_family} trials of {plan.trial_steps} steps, by AP on "
        f"{HOLDOUT:.0%} of the training images, which were held out"
    )
    if plan.choices:
        trials = "{chosen} were chosen by the trials of another study"
    if plan.head == "same":
        same = "Architecture, anchors, assignment and box loss are the same for all losses. Learning rate"
        chosen = "and box balance (fixed or balanced) of each loss"
    else:
        same = "Head, box loss and box balance are those of each loss's publication. Learning rate"
        chosen = "of each loss"
    covered = "over images alone, because there is one seed"
    if plan.seeds > 1:
        covered = "over images and seeds; a loss with fewer seeds is compared on those"
    return (
        f"{same} {trials.format(chosen=chosen)}. Then {plan.steps} steps with {plan.seeds} "
        f"seeds, evaluated on the validation images. 95 % intervals of paired differences: {covered}."
    )


def headline_rows(outcome: SetOutcome) -> list[list[str]]:
    """Return the difference of RS to the usual loss and to the best rival, at a quarter of the steps and at the end."""
    early, late = outcome.differences(QUARTER), outcome.differences(1.0)
    return [
        [outcome.data.name, LOSS_TITLES[loss], *difference_cells(early.get(loss)), *difference_cells(late.get(loss))]
        for loss in dict.fromkeys(outcome.compared)
    ]


def difference_cells(difference: Difference | None) -> list[str]:
    """Return a difference with its interval, and its verdict; dashes if there is none."""
    if difference is None:
        return [DASH, DASH]
    return [f"{difference.value:+.1f} ({difference.low:+.1f} to {difference.high:+.1f})", difference.verdict]


COLUMNS = [
    *("loss", "seeds", "lr", "boxes", "AP at a quarter", "AP", "AP50", "AP75", "oLRP", "RS minus this"),
    *(f"steps to {share:.0%}" for share in SHARES),
]


def loss_rows(outcome: SetOutcome) -> list[list[str]]:
    """Return one row per loss."""
    differences = outcome.differences(1.0)
    rows = []
    for result in outcome.results:
        means = [result.mean(name) for name in ("AP", "AP50", "AP75", "oLRP")]
        reached = [result.steps_to(share * outcome.best_ap) for share in SHARES]
        rows.append(
            [
                LOSS_TITLES[result.loss],
                str(len(result.runs)),
                f"{result.choice.rate:g}",
                result.choice.boxes,
                f"{result.mean_at(QUARTER)[1]:.1f}",
                *(with_deviation(mean.mean, mean.deviation) for mean in means),
                " ".join(difference_cells(differences[result.loss])) if result.loss in differences else DASH,
                *(DASH if steps is None else f"{steps:.0f}" for steps in reached),
            ]
        )
    return rows


def mask_and_box_columns(outcome: SetOutcome) -> list[str]:
    """Name the columns of the mask and box table."""
    titles = [LOSS_TITLES[result.loss] for result in outcome.results]
    differences = [f"RS minus {LOSS_TITLES[loss]}" for loss in outcome.differences(1.0)]
    return ["steps", *(f"{of}: {name}" for of in ("masks", "boxes") for name in (*titles, *differences))]


def mask_and_box_rows(outcome: SetOutcome) -> list[list[str]]:
    """Return one row per evaluation: the AP of each loss and the differences of RS, of masks and then of boxes."""
    every = outcome.results[0].curve()[0]
    rows = []
    for step in outcome.steps_of_masks_and_boxes:
        cells = []
        for boxes in (False, True):
            curves = [result.box_curves() if boxes else result.curve()[1] for result in outcome.results]
            cells += [f"{np.mean([run[every.index(step)] for run in runs]):.1f}" for runs in curves]
            differences = outcome.differences(step / every[-1], boxes=boxes)
            cells += [" ".join(difference_cells(each)) for each in differences.values()]
        rows.append([f"{step:,}", *cells])
    return rows


MAX_CLASSES = 20  # columns of the class table


def class_names(outcome: SetOutcome) -> list[str]:
    """List the columns of the class table; empty if it would be too wide or a record has no AP by class."""
    classes = [result.class_ap() for result in outcome.results]
    return list(classes[0]) if all(classes) and len(classes[0]) <= MAX_CLASSES else []


def class_rows(outcome: SetOutcome) -> list[list[str]]:
    """Return one row per loss: the mean AP of each class over the seeds."""
    names = class_names(outcome)
    by_loss = [(result.loss, result.class_ap()) for result in outcome.results]
    return [[LOSS_TITLES[loss], *(f"{aps[name]:.1f}" for name in names)] for loss, aps in by_loss]


STEP_COLUMNS = ["loss", "seconds per step"]


def step_rows(plan: LossPlan, timed: StepMeasurements) -> list[list[str]]:
    """Return one row per loss: the median time of a step, and its ratio to the usual loss with the quartiles."""
    samples = {
        run.row.loss: timed.samples[run.row.key]
        for run in plan.first_runs()[plan.detector.title]
        if run.row.key in timed.samples
    }
    usual = samples.get(plan.detector.usual)
    rows = []
    for loss, own in samples.items():
        spread = None if usual is None else ratio(own, usual)
        compared = DASH if spread is None else f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
        rows.append([LOSS_TITLES[loss], f"{median(own.values()):.3f}", compared])
    return rows


def to_json(plan: LossPlan, outcomes: Sequence[SetOutcome], timed: StepMeasurements | None = None) -> dict[str, Any]:
    """Return everything behind the page: the results by data set, and the records of all finished trials and runs."""
    sets = []
    for outcome in outcomes:
        losses = [
            {
                "loss": result.loss,
                "lr": result.choice.rate,
                "boxes": result.choice.boxes,
                "curve": result.curve(),
            }
            for result in outcome.results
        ]
        late = {loss: vars(each) for loss, each in outcome.differences(1.0).items()}
        early = {loss: vars(each) for loss, each in outcome.differences(QUARTER).items()}
        tables = {"headline": headline_rows(outcome), "rows": loss_rows(outcome)}
        if over_steps := mask_and_box_rows(outcome):
            tables["masks_and_boxes"] = [mask_and_box_columns(outcome), *over_steps]
        differences = {"quarter": early, "end": late}
        sets.append({"data": outcome.data.name, "losses": losses, "rs_minus": differences, **tables})
    trials = [
        {
            "data": arm.data.name,
            "loss": arm.row.loss,
            "lr": trial.choice.rate,
            "boxes": trial.choice.boxes,
            "usual_boxes": trial.choice.balanced == plan.balances(arm)[0],
            **record_of(trial).to_json(),
        }
        for arm in plan.families()
        for trial in plan.trials(arm)
        if trial.finished
    ]
    runs = [record_of(run).to_json() for outcome in outcomes for result in outcome.results for run in result.runs]
    steps = None if timed is None else {"rows": step_rows(plan, timed), **vars(timed)}
    return {"sets": sets, "steps": steps, "trials": trials, "runs": runs}


def _panels(outcomes: Sequence[SetOutcome], panel: Any) -> Figure | None:
    if not outcomes:
        return None
    figure = Figure(figsize=(PANEL[0] * len(outcomes), PANEL[1]), layout="constrained")
    for axes, outcome in zip(figure.subplots(1, len(outcomes), squeeze=False)[0], outcomes, strict=True):
        axes.set_title(outcome.data.name, loc="left", fontweight="bold", fontsize=10)
        panel(axes, outcome.results)
    return figure


def _over_steps(axes: Axes, results: Sequence[LossResult]) -> None:
    for result in results:
        steps, values = result.curve()
        means, colour = np.mean(values, axis=0), LOSS_COLOURS[result.loss]
        axes.plot(steps, means, color=colour, marker="o", markersize=3, label=LOSS_TITLES[result.loss])
        axes.fill_between(steps, np.min(values, axis=0), np.max(values, axis=0), color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel="AP in per cent", xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False, fontsize=7, loc="lower right")


def _rates(plan: LossPlan) -> Figure | None:
    """Draw the AP of the trials over the learning rate, for each loss with the box balance of its paper."""
    shown: list[tuple[Path, dict[str, dict[float, float]]]] = []
    for data in plan.data:
        aps = {
            loss: {
                trial.choice.rate: trial.metric() for trial in plan.rate_trials(plan.arm(data, loss)) if trial.finished
            }
            for loss in plan.losses
        }
        if any(aps.values()):
            shown.append((data, {loss: of_loss for loss, of_loss in aps.items() if of_loss}))
    if not shown:
        return None
    rates = plan.rates(plan.arms[0])
    figure = Figure(figsize=(PANEL[0] * len(shown), PANEL[1]), layout="constrained")
    for axes, (data, aps) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.set_title(data.name, loc="left", fontweight="bold", fontsize=10)
        for loss, by_rate in aps.items():
            axes.plot(
                list(by_rate),
                list(by_rate.values()),
                color=LOSS_COLOURS[loss],
                marker="o",
                markersize=3,
                label=LOSS_TITLES[loss],
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.set(xlabel="learning rate", ylabel=f"AP after {plan.trial_steps} steps", ylim=(0, None))
        axes.legend(frameon=False, fontsize=7, loc="lower right")
    return figure
