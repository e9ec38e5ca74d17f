"""The figure of the demo: AP over steps and over time, the time per step, and detections side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bucketrank.demo.compared_images import ComparedImage
from bucketrank.demo.paired_runs import DemoRun
from bucketrank.provenance.figure_style import INK, STYLE
from bucketrank.provenance.machine import describe, in_words

COLOURS = {"ranking": "#0072B2", "focal": "#E69F00"}
MARKERS = {"ranking": "o", "focal": "v"}


def draw_comparison(
    runs: Sequence[DemoRun], images: Sequence[ComparedImage], path: Path, *, title: str, note: str
) -> None:
    """Draw the figure and write it to ``path``."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 4.3 + 3.1 * 3), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=[3.6, 9.4])
        top, bottom = parts
        top.suptitle(title, fontsize=14, fontweight="bold", color=INK, x=0.012, ha="left")
        over_steps, over_time, times = top.subplots(1, 3, width_ratios=[1.2, 1.2, 0.8])
        _curves(over_steps, runs, over_time=False)
        _curves(over_time, runs, over_time=True)
        over_time.sharey(over_steps)
        _times(times, runs)
        names = ["ground truth", *(run.loss.label for run in runs)]
        axes = bottom.subplots(len(names), len(images), squeeze=False)
        for column, image in enumerate(images):
            for row, name in enumerate(names):
                _image(axes[row][column], image, row, name if column == 0 else "")
        footer = "\n".join([*textwrap.wrap(note, 200), *textwrap.wrap(in_words(describe()), 200)])
        figure.text(0.012, -0.002, footer, fontsize=7, color="#777777", va="top")
        figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.15)


def _curves(axes: Axes, runs: Sequence[DemoRun], *, over_time: bool) -> None:
    for run in runs:
        points = run.curve
        x = [point.seconds / 60 if over_time else point.step for point in points]
        colour, marker = COLOURS[run.loss.name], MARKERS[run.loss.name]
        y = [point.metrics["AP50"] for point in points]
        axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=2.2, label=run.loss.label)
        y = [point.metrics["AP"] for point in points]
        axes.plot(x, y, color=colour, linewidth=1.2, linestyle=(0, (2, 2)))
    axes.set(xlabel="minutes of training" if over_time else "steps", ylim=(0, 1), xlim=(0, None))
    if not over_time:
        axes.set_ylabel("AP50 (bold) and AP (dotted) on validation images")
        axes.legend(frameon=False, loc="upper left")
    axes.grid(axis="y", color="#E8E8E8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def _times(axes: Axes, runs: Sequence[DemoRun]) -> None:
    for x, run in enumerate(runs):
        low, middle, high = np.percentile(run.durations, [25, 50, 75])
        axes.bar(x, middle, width=0.55, color=COLOURS[run.loss.name])
        axes.errorbar(x, middle, [[middle - low], [high - middle]], color=INK, linewidth=1, capsize=3)
        axes.text(x, high, f"{middle:.2f} s\n", ha="center", va="bottom", linespacing=0.4)
    axes.set_xticks(range(len(runs)), [run.loss.label for run in runs])
    axes.set(ylabel="seconds per step, median and quartiles", ylim=(0, 1.25 * axes.get_ylim()[1]))
    axes.tick_params(length=0)


def _image(axes: Axes, image: ComparedImage, row: int, name: str) -> None:
    axes.imshow(np.asarray(image.drawn[row]))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    if name:
        axes.set_ylabel(name, fontsize=11)
    if row == 0:
        text = f"{image.objects} objects"
    else:
        correct, wrong = image.counts[row - 1]
        text = f"{correct} correct, {wrong} wrong"
    axes.set_title(text, fontsize=9, color=INK, pad=4)
