"""The figures of a study: seconds per step, AP over steps, AP over training time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bucketrank.provenance.figure_style import STYLE, save_figure
from bucketrank.study.study_results import RowResult, StudyOutcome

COLOURS = {"rs": "#0072B2", "ap": "#009E73", "alrp": "#CC79A7", "dr": "#E69F00", "focal": "#D55E00", "ce": "#D55E00"}
LINES = {"pairwise": ":", "bucketed": "--"}
ALPHAS = {"pairwise": 0.45, "bucketed": 0.7}
PANEL = (4.2, 3.2)  # width and height in inches
MIN_LINE = 3  # evaluations of a run


def draw_study(outcome: StudyOutcome, out: Path) -> list[tuple[str, str]]:
    """Write the figures as PNG and SVG; return the name of each SVG with a caption."""
    captions = []
    with mpl.rc_context(STYLE):
        for name, caption, panel, has_numbers in (
            ("t_iter", "Seconds of a training step by loss", _bars, _timed),
            ("ap_over_steps", "AP over the steps of training", _over_steps, _trained),
            ("ap_over_time", "AP over training time", _over_time, _trained),
        ):
            figure = _panels(outcome, panel, has_numbers)
            if figure is not None:
                save_figure(figure, out, name)
                captions.append((f"{name}.svg", caption))
    return captions


def _timed(result: RowResult) -> bool:
    return result.seconds is not None


def _trained(result: RowResult) -> bool:
    return bool(result.runs)


def _panels(
    outcome: StudyOutcome, panel: Callable[[Axes, Sequence[RowResult]], None], has_numbers: Callable[[RowResult], bool]
) -> Figure | None:
    """Return a figure with one panel per detector; None if no detector has numbers for it."""
    shown = [(name, [result for result in outcome.of(name) if has_numbers(result)]) for name in outcome.detectors]
    shown = [(name, results) for name, results in shown if results]
    if not shown:
        return None
    figure = Figure(figsize=(PANEL[0] * len(shown), PANEL[1]), layout="constrained")
    for axes, (name, results) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.set_title(name, loc="left", fontweight="bold", fontsize=10)
        panel(axes, results)
    return figure


def _bars(axes: Axes, results: Sequence[RowResult]) -> None:
    names = [result.row.title for result in results]
    seconds = [result.seconds or 0.0 for result in results]
    positions = np.arange(len(results))
    colours = [COLOURS[result.row.loss] for result in results]
    bars = axes.barh(positions, seconds, color=colours, height=0.65)
    for bar, result in zip(bars, results, strict=True):
        bar.set_alpha(ALPHAS.get(result.row.method, 1.0))
    axes.bar_label(bars, labels=[f"{value:.2f}" for value in seconds], padding=3, fontsize=8)
    axes.set_yticks(positions, names)
    axes.invert_yaxis()
    axes.set(xlabel="seconds per step", xlim=(0, 1.15 * max(seconds)))


def _over_steps(axes: Axes, results: Sequence[RowResult]) -> None:
    _curves(axes, results, lambda result: 1.0)
    axes.set(xlabel="step", ylabel="AP in per cent")


def _over_time(axes: Axes, results: Sequence[RowResult]) -> None:
    _curves(axes, results, lambda result: (result.seconds or 0.0) / 60)
    axes.set(xlabel="training time in minutes (steps times T_iter)", ylabel="AP in per cent")


def _curves(axes: Axes, results: Sequence[RowResult], scale: Callable[[RowResult], float]) -> None:
    """Draw the mean over seeds as a line, and a band from the lowest to the highest seed.

    Fewer than MIN_LINE evaluations are drawn as dots with ranges: a line would suggest a course that is not known.
    """
    for result in results:
        curves = [run.curve() for run in result.runs]
        steps = np.asarray(curves[0][0]) * scale(result)
        values = np.asarray([curve for _, curve in curves if len(curve) == len(steps)])
        mean, low, high = values.mean(axis=0), values.min(axis=0), values.max(axis=0)
        colour, title = COLOURS[result.row.loss], result.row.title
        if len(steps) < MIN_LINE:
            axes.errorbar(steps, mean, [mean - low, high - mean], fmt="o", color=colour, markersize=4, label=title)
            continue
        line = LINES.get(result.row.method, "-")
        axes.plot(steps, mean, line, color=colour, marker="o", markersize=3, label=title)
        if len(values) > 1:
            axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7, loc="lower right")
