"""The curves of a run as a figure: its losses, and AP after each epoch."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from bucketrank.figures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, STYLE, VERMILION
from bucketrank.settings.choices import TRAIN_COLUMNS
from bucketrank.training.csv_table import CsvTable
from bucketrank.weights.atomic import write

COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY)
SMOOTHED_POINTS = 40  # of the bold curves


def draw_curves(train: CsvTable, validation: CsvTable, path: Path) -> None:
    """Draw losses on the left and AP on the right; write nothing if there are no rows yet."""
    rows = train.rows()
    if not rows:
        return
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        terms = [name for name in rows[0] if name not in TRAIN_COLUMNS]
        for name, colour in zip(["loss", *terms], (INK, *COLOURS * 3), strict=False):
            steps, values = train.column(name)
            left.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
            left.plot(*_means(steps, values), color=colour, label=name, linewidth=2.0 if name == "loss" else 1.2)
        left.set(xlabel="step", ylabel="loss, mean of neighbours in bold", ylim=(0, None))
        left.legend(frameon=False, fontsize=7, ncols=2)
        measured = validation.rows()
        names = [name for name in (measured[0] if measured else {}) if name.endswith(("/AP", "/AP50", "/AP75"))]
        for name, colour in zip(names, COLOURS, strict=False):
            steps, values = validation.column(name)
            right.plot(steps, [100 * value for value in values], color=colour, label=name, marker="o", markersize=3)
        right.set(xlabel="step", ylabel="AP in per cent", ylim=(0, None))
        if names:
            right.legend(frameon=False, fontsize=7)
        write(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))


def _means(steps: list[int], values: list[float]) -> tuple[list[float], list[float]]:
    parts = min(SMOOTHED_POINTS, len(steps))
    return (
        [float(np.mean(part)) for part in np.array_split(steps, parts)],
        [float(np.mean(part)) for part in np.array_split(values, parts)],
    )
