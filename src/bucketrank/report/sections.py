"""Sections of the page: tables of settings and metrics, training curves, precision and recall, and reliability."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from bucketrank.evaluation.metrics import ERRORS, Curve
from bucketrank.report.built import Facts, differing, fact_rows, warning
from bucketrank.report.chart import (
    COLOURS,
    MAX_POINTS,
    Chart,
    ChartLine,
    Html,
    Points,
    chart_grid,
    draw_chart,
    join,
    table,
    tag,
    thinned,
)
from bucketrank.report.measurements import Measurement
from bucketrank.report.run_folder import RunFolder
from bucketrank.settings.choices import TRAIN_COLUMNS
from bucketrank.settings.recipe import differences
from bucketrank.weights.files import describe_scores

METRICS = ("AP", "AP50", "AP75")
MANY_TERMS = 8  # this many loss-term charts, or more, are collapsed
MANY_ROWS = 30  # a longer table of settings scrolls
CALIBRATION_COLUMNS = ("D-ECE", "LaECE", "scores")


def settings_section(runs: Sequence[RunFolder], built: Sequence[Facts | None]) -> Html:
    """Show what the built detectors have and the settings that differ, marked where runs differ.

    ``built`` are the facts of each run's detector; None for a run that was not measured.
    """
    facts = [each or {} for each in built]
    known = [each for each in facts if each]
    names = [run.name for run in runs]
    parts = []
    if len(runs) > 1:
        keys = list(dict.fromkeys(key for run in runs[1:] for key in differences(runs[0].recipe, run.recipe)))
        flat = [run.recipe.flat() for run in runs]
        rows: list[list[str | Html]] = []
        if len(known) == len(runs):
            parts.append(warning(facts, keys))
            rows += fact_rows(facts, differing(facts), mark=False)
        rows += [[key, *(_setting_text(values, key) for values in flat)] for key in keys]
        caption = "Differences: first what the detectors were built with, then settings; - where one has none."
        same = tag("p", "All runs have the same settings.")
        tall = len(rows) > MANY_ROWS
        parts.append(table(["setting", *names], rows, caption=caption, tall=tall, text=True) if rows else same)
    if known:
        caption = "What the detectors have where a recipe leaves a choice open (null)."
        all_rows = list(fact_rows(facts))
        full = table(["part", *names], all_rows, caption=caption, tall=len(all_rows) > MANY_ROWS, text=True)
        title = "The built detectors, part by part" if len(runs) > 1 else "The built detector, part by part"
        parts.append(tag("details", tag("summary", title), full))
    return join(*parts)


def metrics_table(metrics: Mapping[str, Mapping[str, float]], *, compare: bool, caption: str) -> Html:
    """Show AP, AR and oLRP with one row per run; ``compare`` puts the best value of each column in bold."""
    columns = list(dict.fromkeys(key for each in metrics.values() for key in each))
    best = {key: _best([each.get(key, math.nan) for each in metrics.values()], lowest=key in ERRORS) for key in columns}
    rows = [
        [name, *(_percent(each.get(key, math.nan), best=best[key] if compare else None) for key in columns)]
        for name, each in metrics.items()
    ]
    return table(["run", *columns], rows, caption=caption)


def class_table(per_class: Mapping[str, Mapping[str, float]], *, compare: bool, caption: str) -> Html:
    """Show the AP per class with one column per run; ``compare`` puts the best value of each row in bold."""
    rows = []
    for name in dict.fromkeys(name for each in per_class.values() for name in each):
        values = [each.get(name, math.nan) for each in per_class.values()]
        best = _best(values) if compare else None
        rows.append([name, *(_percent(value, best=best) for value in values)])
    return table(["class", *per_class], rows, caption=caption, tall=True)


def _best(values: Sequence[float], *, lowest: bool = False) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return (min if lowest else max)(finite) if len(finite) > 1 else None


def _percent(value: float, *, best: float | None) -> Html:
    if not math.isfinite(value):
        return Html("-")
    text = f"{100 * value:.1f}"
    # Compare the rounded texts, so that equal texts are both in bold.
    return tag("b", text) if best is not None and text == f"{100 * best:.1f}" else Html(text)


def _setting_text(values: Mapping[str, Any], key: str) -> str:
    """Format the value of a setting.

    >>> values = {"schedule.factors": {"offsets": 0.1}, "init": None}
    >>> _setting_text(values, "schedule.factors"), _setting_text(values, "init")
    ('offsets 0.1', 'none')
    """
    value = values.get(key, "-")
    if isinstance(value, dict):
        value = [f"{name} {each}" for name, each in value.items()]
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def curves(runs: Sequence[RunFolder]) -> Html:
    """Draw AP and losses over the steps, all runs in each chart, and a table with steps, learning rate and time."""
    terms = list(dict.fromkeys(name for run in runs for name in run.train.values if name not in TRAIN_COLUMNS))
    iou_types = [each for each in ("boxes", "masks") if any(f"{each}/AP" in run.validation.values for run in runs)]
    validated = {
        f"{name} of {iou_type}": [
            [(float(step), 100 * value) for step, value in run.validation.pairs(f"{iou_type}/{name}")] for run in runs
        ]
        for iou_type in iou_types
        for name in METRICS
    }
    precision = _over_steps(runs, validated, "per cent, on the validation set")
    loss = _over_steps(runs, {"loss": [thinned(run.train.pairs("loss")) for run in runs]}, "sum of all terms")
    logged = {name: [thinned(run.train.pairs(name)) for run in runs] for name in terms}
    term_charts = _over_steps(runs, logged, "loss term")
    if not precision and not loss:
        return tag("p", "No curves: train.csv and validation.csv of these runs have no rows.")
    if len(term_charts) < MANY_TERMS:
        return tag("div", chart_grid(precision), chart_grid([*loss, *term_charts]), run_numbers(runs))
    collapsed = tag("details", tag("summary", f"The {len(term_charts)} loss terms"), chart_grid(term_charts))
    return tag("div", chart_grid([*precision, *loss]), collapsed, run_numbers(runs))


def _over_steps(runs: Sequence[RunFolder], columns: Mapping[str, Sequence[Points]], y_label: str) -> list[Html]:
    """Draw a chart of each column, the points of every run, that has any; their step ranges start at 0 and line up."""
    charts = []
    for name, of_runs in columns.items():
        lines = [
            ChartLine(run.name, points, colour=number % COLOURS, run=number, dashed=number >= COLOURS)
            for number, (run, points) in enumerate(zip(runs, of_runs, strict=True))
            if points
        ]
        if lines:
            steps = 0.0, max(1.0, *(x for line in lines for x, _ in line.points))
            charts.append(draw_chart(Chart(name, "step", y_label, lines, steps)))
    return charts


def run_numbers(runs: Sequence[RunFolder]) -> Html:
    """Show steps, learning rate and seconds per step of each run."""
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


def precision_recall(measurement: Measurement, *, colour: int) -> Html:
    """Draw the precision-recall curves of boxes and masks, with a mark at the stored threshold."""
    threshold = measurement.meta.threshold
    charts = []
    for iou_type, by_iou in measurement.precision_recall.items():
        lines = [
            line
            for number, (iou, curve) in enumerate(by_iou.items())
            if (line := _line(curve, f"IoU {iou:g}", threshold, colour=colour, dashed=number > 0)) is not None
        ]
        if lines:
            title = f"precision of {iou_type}"
            chart = Chart(title, "recall", "IoU 0.5 solid, 0.75 dashed", lines, (0, 1), (0, 1), digits=3)
            charts.append(draw_chart(chart))
    if not charts:
        return tag("p", "No curve: these images have no objects or no detections.")
    about_threshold = (
        f"The ring marks the stored threshold, {threshold:.4g}: the best-F1 score at IoU 0.5 when the run was "
        "validated."
        if threshold > 0
        else "These weights have no stored threshold: no detection was correct when the run was validated."
    )
    return tag("div", chart_grid(charts), tag("p", f"All classes together. {about_threshold}", class_="note"))


def _line(curve: Curve, name: str, threshold: float, *, colour: int, dashed: bool) -> ChartLine | None:
    if not len(curve.scores) or np.isnan(curve.recall).all():
        return None
    last = int((curve.scores >= threshold).sum()) - 1  # last point at or above the threshold
    chosen = set(np.searchsorted(curve.recall, np.linspace(0, curve.recall[-1], MAX_POINTS)).tolist())
    chosen |= {0, max(last, 0)}
    indices = sorted(index for index in chosen if index < len(curve.scores))
    marked = indices.index(last) if threshold > 0 and last >= 0 else None
    return ChartLine(
        name,
        [(float(curve.recall[index]), float(curve.precision[index])) for index in indices],
        colour=colour,
        dashed=dashed,
        notes=[f"score {curve.scores[index]:.3g}" for index in indices],
        mark=marked,
        mark_name=f"stored threshold, {threshold:.4g}",
    )


def reliability(measurement: Measurement, *, colour: int) -> Html:
    """Draw how often boxes of each score are right; calibrated scores lie on the dashed diagonal."""
    bins = measurement.errors.reliability
    words = describe_scores(measurement.meta)
    if not len(bins.counts):
        return tag("p", f"No diagram: these images have no detections. {words}")
    lines = [
        ChartLine("calibrated", [(0.0, 0.0), (1.0, 1.0)], colour=colour, dashed=True),
        ChartLine(
            "this run",
            list(zip(bins.scores.tolist(), bins.outcomes.tolist(), strict=True)),
            colour=colour,
            notes=[f"{count:,} detections" for count in bins.counts.tolist()],
        ),
    ]
    chart = Chart("share of right detections", "score", "calibrated dashed", lines, (0, 1), (0, 1), digits=3)
    about = (
        "Each point is a score interval of width 0.04; a detection is right if it matches an object of its class at "
        f"an IoU of 0.5. {words}"
    )
    return tag("div", chart_grid([draw_chart(chart)]), tag("p", about, class_="note"))


def calibration_row(measurement: Measurement) -> list[str]:
    """Format the calibration errors of a run, one cell per CALIBRATION_COLUMNS."""
    errors = measurement.errors
    numbers = [f"{each:.4f}" if math.isfinite(each) else "-" for each in (errors.d_ece, errors.la_ece)]
    return [*numbers, "calibrated" if measurement.meta.calibration is not None else "not calibrated"]
