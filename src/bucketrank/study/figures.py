"""A study's plots: seconds a step, AP over steps, AP over training time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bucketrank.bench.style import STYLE, save
from bucketrank.study.results import Outcome, Result

COLOURS = {"rs": "#0072B2", "ap": "#009E73", "alrp": "#CC79A7", "dr": "#E69F00", "focal": "#D55E00", "ce": "#D55E00"}
LINES = {"pairwise": ":", "bucketed": "--"}
ALPHAS = {"pairwise": 0.45, "bucketed": 0.7}
PANEL = (4.2, 3.2)  # inches


def draw(outcome: Outcome, out: Path) -> list[tuple[str, str]]:
    """Writes PNG and SVG; returns the files' names for a document, and what they show."""
    drawn = []
    with mpl.rc_context(STYLE):
        for name, text, panel, wanted in (
            ("t_iter", "Seconds of a training step by loss", _bars, _timed),
            ("ap_over_steps", "AP over the steps of training", _over_steps, _trained),
            ("ap_over_time", "AP over training time", _over_time, _trained),
        ):
            figure = _panels(outcome, panel, wanted)
            if figure is not None:
                save(figure, out, name)
                drawn.append((f"{name}.svg", text))
    return drawn


def _timed(each: Result) -> bool:
    return each.seconds is not None


def _trained(each: Result) -> bool:
    return bool(each.runs)


def _panels(
    outcome: Outcome, panel: Callable[[Axes, Sequence[Result]], None], wanted: Callable[[Result], bool]
) -> Figure | None:
    """One panel a detector."""
    shown = [(name, [each for each in outcome.of(name) if wanted(each)]) for name in outcome.detectors]
    shown = [(name, results) for name, results in shown if results]
    if not shown:
        return None
    figure = Figure(figsize=(PANEL[0] * len(shown), PANEL[1]), layout="constrained")
    for axes, (name, results) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.set_title(name, loc="left", fontweight="bold", fontsize=10)
        panel(axes, results)
    return figure


def _bars(axes: Axes, results: Sequence[Result]) -> None:
    names = [each.row.title for each in results]
    values = [each.seconds or 0.0 for each in results]
    places = np.arange(len(results))
    colours = [COLOURS[each.row.loss] for each in results]
    bars = axes.barh(places, values, color=colours, height=0.65)
    for bar, each in zip(bars, results, strict=True):
        bar.set_alpha(ALPHAS.get(each.row.method, 1.0))
    axes.bar_label(bars, labels=[f"{value:.2f}" for value in values], padding=3, fontsize=8)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set(xlabel="seconds a step", xlim=(0, 1.15 * max(values)))


def _over_steps(axes: Axes, results: Sequence[Result]) -> None:
    _curves(axes, results, lambda each: 1.0)
    axes.set(xlabel="step", ylabel="AP in per cent")


def _over_time(axes: Axes, results: Sequence[Result]) -> None:
    _curves(axes, results, lambda each: (each.seconds or 0.0) / 60)
    axes.set(xlabel="training time in minutes (steps times T_iter)", ylabel="AP in per cent")


def _curves(axes: Axes, results: Sequence[Result], scale: Callable[[Result], float]) -> None:
    """The mean over seeds, and between the lowest and the highest a shade."""
    for each in results:
        curves = [run.curve() for run in each.runs]
        steps = np.asarray(curves[0][0]) * scale(each)
        values = np.asarray([curve for _, curve in curves if len(curve) == len(steps)])
        colour = COLOURS[each.row.loss]
        line = LINES.get(each.row.method, "-")
        axes.plot(steps, values.mean(axis=0), line, color=colour, marker="o", markersize=3, label=each.row.title)
        if len(values) > 1:
            axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.12, linewidth=0)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7, loc="lower right")
