"""Charts of losses and AP over the training steps, with all runs in each chart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from bucketrank.report.chart import COLOURS, Chart, ChartLine, chart_grid, draw_chart, thinned
from bucketrank.report.html_tables import table
from bucketrank.report.markup import Html, tag
from bucketrank.report.run_folder import RunFolder

NOT_TERMS = ("step", "epoch", "loss", "lr", "seconds")  # columns of train.csv that are no terms of the loss
METRICS = ("AP", "AP50", "AP75")
MANY_TERMS = 8  # from this number on, the charts of the terms are collapsed


def curves(runs: Sequence[RunFolder]) -> Html:
    """Return the charts, and a table with steps, learning rate and time of each run."""
    terms = list(dict.fromkeys(name for run in runs for name in run.train.values if name not in NOT_TERMS))
    iou_types = [each for each in ("boxes", "masks") if any(f"{each}/AP" in run.validation.values for run in runs)]
    precision = _drawn(_precision(runs, iou_type, name) for iou_type in iou_types for name in METRICS)
    loss = _drawn([_losses(runs, "loss", "sum of all terms")])
    term_charts = _drawn(_losses(runs, name, "term of the loss") for name in terms)
    if not precision and not loss:
        return tag("p", "No curves: train.csv and validation.csv of these runs have no rows.")
    if len(term_charts) < MANY_TERMS:
        return tag("div", chart_grid(precision), chart_grid([*loss, *term_charts]), run_numbers(runs))
    collapsed = tag("details", tag("summary", f"The {len(term_charts)} terms of the loss"), chart_grid(term_charts))
    return tag("div", chart_grid([*precision, *loss]), collapsed, run_numbers(runs))


def _drawn(charts: Iterable[Chart | None]) -> list[Html]:
    return [draw_chart(chart) for chart in charts if chart is not None]


def run_numbers(runs: Sequence[RunFolder]) -> Html:
    """Return a table with steps, learning rate and seconds per step of each run."""
    head = ["", "steps", "epochs", "highest learning rate", "last learning rate", "seconds per step (median)"]
    rows = []
    for run in runs:
        rates = [value for _, value in run.train.pairs("lr")]
        seconds = [value for _, value in run.train.pairs("seconds")]
        epochs = run.train.last().get("epoch", math.nan)
        rows.append(
            [
                run.name,
                f"{run.train.steps[-1]:,}" if run.train.steps else "-",
                f"{epochs:g}" if math.isfinite(epochs) else "-",
                f"{max(rates):.3g}" if rates else "-",
                f"{rates[-1]:.3g}" if rates else "-",
                f"{median(seconds):.3g}" if seconds else "-",
            ]
        )
    return table(head, rows, caption="Seconds per step include the time spent waiting for images.")


def _losses(runs: Sequence[RunFolder], name: str, y_label: str) -> Chart | None:
    lines = [
        ChartLine(run.name, thinned(points), colour=number % COLOURS, run=number, dashed=number >= COLOURS)
        for number, run in enumerate(runs)
        if (points := run.train.pairs(name))
    ]
    return Chart(name, "step", y_label, lines, _steps(lines)) if lines else None


def _precision(runs: Sequence[RunFolder], iou_type: str, name: str) -> Chart | None:
    lines = []
    for number, run in enumerate(runs):
        points = [(float(step), 100 * value) for step, value in run.validation.pairs(f"{iou_type}/{name}")]
        if points:
            lines.append(ChartLine(run.name, points, colour=number % COLOURS, run=number, dashed=number >= COLOURS))
    return (
        Chart(f"{name} of {iou_type}", "step", "per cent, on the validation set", lines, _steps(lines))
        if lines
        else None
    )


def _steps(lines: Sequence[ChartLine]) -> tuple[float, float]:
    """Return a range of steps that starts at 0, so that the charts line up."""
    return 0.0, max(1.0, *(x for line in lines for x, _ in line.points))
