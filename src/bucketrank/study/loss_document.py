"""The study ``losses`` as a page: the headline table, all losses, and figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bucketrank.bench.bench_documents import markdown_table
from bucketrank.bench.timing import ratio
from bucketrank.evaluation import Difference
from bucketrank.provenance.figure_style import STYLE, save_figure
from bucketrank.study.loss_comparison import TITLES, LossComparison, balance_name
from bucketrank.study.loss_outcome import QUARTER, SHARES, LossResult, SetOutcome, record_of
from bucketrank.study.step_measurements import StepMeasurements
from bucketrank.study.study_tables import DASH, with_deviation
from bucketrank.weights.atomic import write_text

COLOURS = {
    "rs": "#0072B2",
    "rsq": "#56B4E9",
    "ap": "#009E73",
    "focal": "#D55E00",
    "qfl": "#E69F00",
    "vfl": "#CC79A7",
    "bce": "#7F7F7F",
    "ce": "#D55E00",
    "mal": "#E69F00",
    "iabce": "#F0E442",
    "dr": "#CC79A7",
    "alrp": "#56B4E9",
}
PANEL = (4.2, 3.4)  # width and height in inches


def write_losses(
    plan: LossComparison,
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
    plan: LossComparison,
    outcomes: Sequence[SetOutcome],
    timed: StepMeasurements | None = None,
    *,
    failed: Mapping[str, str] | None = None,
) -> str:
    """Return the page; ``failed`` are the errors of the runs that failed, by name."""
    lines = [f"# {title(plan)}", "", _protocol(plan), ""]
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
    trials = [trial for data in plan.data for loss in plan.losses for trial in plan.trials(data, loss)]
    if any(trial.finished for trial in trials):
        lines += ["![AP over learning rates](ap_over_rates.svg)", ""]
    lines += _blind_losses(plan)
    if timed is not None:
        usual = TITLES[plan.detector.usual]
        columns = [*STEP_COLUMNS, f"ratio to {usual}"]
        lines += ["## Seconds per step", "", markdown_table(columns, step_rows(plan, timed)), ""]
    if failed:
        lines += ["## Failed", "", *(f"- {name}: {error}" for name, error in failed.items()), ""]
    missing = plan.total - sum(len(result.runs) for outcome in outcomes for result in outcome.results)
    missing -= sum(trial.finished for trial in trials)
    return "\n".join(
        [*lines, f"Not complete: {missing} of {plan.total} runs are not finished.", ""] if missing else lines
    )


def _blind_losses(plan: LossComparison) -> list[str]:
    """Return a line for each loss whose trials detected nothing, so that its learning rate was not chosen by AP."""
    lines = []
    for data in plan.data:
        for loss in plan.losses:
            best = plan.chosen(data, loss)
            if best is not None and not best.metric() > 0:
                lines += [
                    f"No trial of {TITLES[loss]} on {data.name} detected an object, so its learning rate is the one "
                    "nearest to the recipe's. Give more --trial-steps.",
                    "",
                ]
    return lines


def title(plan: LossComparison) -> str:
    """Return the title of the page."""
    return f"{plan.detector.title}: losses " + ("compared in one head" if plan.head == "same" else "as published")


def _protocol(plan: LossComparison) -> str:
    rates = ", ".join(f"{rate:g}" for rate in plan.rates)
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
        f"{same} (of {rates}) {chosen}: the best of {plan.trials_per_loss} trials of {plan.trial_steps} steps, by AP "
        f"on {plan.holdout:.0%} of the training images, which were held out. Then {plan.steps} steps with {plan.seeds} "
        f"seeds, evaluated on the validation images. 95 % intervals of paired differences: {covered}."
    )


def headline_rows(outcome: SetOutcome) -> list[list[str]]:
    """Return the difference of RS to the usual loss and to the best rival, at a quarter of the steps and at the end."""
    early, late = outcome.differences(QUARTER), outcome.differences(1.0)
    return [
        [outcome.data.name, TITLES[loss], *difference_cells(early.get(loss)), *difference_cells(late.get(loss))]
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
                TITLES[result.loss],
                str(len(result.runs)),
                f"{result.rate:g}",
                balance_name(result.balanced),
                f"{result.mean_at(QUARTER)[1]:.1f}",
                *(with_deviation(mean.mean, mean.deviation) for mean in means),
                " ".join(difference_cells(differences[result.loss])) if result.loss in differences else DASH,
                *(DASH if steps is None else f"{steps:.0f}" for steps in reached),
            ]
        )
    return rows


def mask_and_box_columns(outcome: SetOutcome) -> list[str]:
    """Return the columns of the table of masks and boxes."""
    titles = [TITLES[result.loss] for result in outcome.results]
    differences = [f"RS minus {TITLES[loss]}" for loss in outcome.differences(1.0)]
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


MOST_CLASSES = 20  # columns of a table of classes


def class_names(outcome: SetOutcome) -> list[str]:
    """Return the classes of the table of classes; empty if it would be too wide or a record has no AP by class."""
    classes = [result.class_ap() for result in outcome.results]
    return list(classes[0]) if all(classes) and len(classes[0]) <= MOST_CLASSES else []


def class_rows(outcome: SetOutcome) -> list[list[str]]:
    """Return one row per loss: the mean AP of each class over the seeds."""
    names = class_names(outcome)
    by_loss = [(result.loss, result.class_ap()) for result in outcome.results]
    return [[TITLES[loss], *(f"{aps[name]:.1f}" for name in names)] for loss, aps in by_loss]


STEP_COLUMNS = ["loss", "seconds per step"]


def step_rows(plan: LossComparison, timed: StepMeasurements) -> list[list[str]]:
    """Return one row per loss: the median time of a step, and its ratio to the usual loss with the quartiles."""
    samples = {run.row.loss: timed.samples[run.row.key] for run in plan.first_runs() if run.row.key in timed.samples}
    usual = samples.get(plan.detector.usual)
    rows = []
    for loss, own in samples.items():
        spread = None if usual is None else ratio(own, usual)
        compared = DASH if spread is None else f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
        rows.append([TITLES[loss], f"{median(own.values()):.3f}", compared])
    return rows


def to_json(
    plan: LossComparison, outcomes: Sequence[SetOutcome], timed: StepMeasurements | None = None
) -> dict[str, Any]:
    """Return everything behind the page: the results by data set, and the records of all finished trials and runs."""
    sets = []
    for outcome in outcomes:
        losses = [
            {
                "loss": result.loss,
                "lr": result.rate,
                "boxes": balance_name(result.balanced),
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
            "data": data.name,
            "loss": loss,
            "lr": trial.rate,
            "boxes": balance_name(trial.balanced),
            "usual_boxes": number < len(plan.factors),  # the last trial has the other box balance
            **record_of(trial).to_json(),
        }
        for data in plan.data
        for loss in plan.losses
        for number, trial in enumerate(plan.trials(data, loss))
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
        means, colour = np.mean(values, axis=0), COLOURS[result.loss]
        axes.plot(steps, means, color=colour, marker="o", markersize=3, label=TITLES[result.loss])
        axes.fill_between(steps, np.min(values, axis=0), np.max(values, axis=0), color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel="AP in per cent", xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False, fontsize=7, loc="lower right")


def _rates(plan: LossComparison) -> Figure | None:
    """Draw the AP of the trials over the learning rate, for each loss with the box balance of its paper."""
    shown: list[tuple[Path, dict[str, dict[float, float]]]] = []
    for data in plan.data:
        aps = {
            loss: {trial.rate: trial.metric() for trial in plan.rate_trials(data, loss) if trial.finished}
            for loss in plan.losses
        }
        if any(aps.values()):
            shown.append((data, {loss: of_loss for loss, of_loss in aps.items() if of_loss}))
    if not shown:
        return None
    figure = Figure(figsize=(PANEL[0] * len(shown), PANEL[1]), layout="constrained")
    for axes, (data, aps) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.set_title(data.name, loc="left", fontweight="bold", fontsize=10)
        for loss, by_rate in aps.items():
            rates, values = list(by_rate), list(by_rate.values())
            axes.plot(rates, values, color=COLOURS[loss], marker="o", markersize=3, label=TITLES[loss])
        axes.set_xscale("log", base=2)
        axes.set_xticks(plan.rates, [f"{rate:g}" for rate in plan.rates])
        axes.set(xlabel="learning rate", ylabel=f"AP after {plan.trial_steps} steps", ylim=(0, None))
        axes.legend(frameon=False, fontsize=7, loc="lower right")
    return figure
