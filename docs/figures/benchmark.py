"""Figures of the benchmark page, from its own tables: python -m docs.figures.benchmark."""

from __future__ import annotations

import re
from functools import partial

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from docs.figures.benchmark_tables import milliseconds, read_table
from docs.figures.theme import Palette, save

LOSSES = {"AP": "AP loss", "RS": "Rank & Sort loss"}
METHODS = {  # column of the table: name in the legend
    "pairwise (definition)": "pairwise",
    "bucketed (paper)": "bucketed",
    "exact, torch ops": "exact, torch",
    "exact, fused kernel": "exact, compiled",
    "focal loss": "focal loss",
}
CONTENDERS = {"rs/exact": "RS, exact", "rs/pairwise": "RS, pairwise", "usual baseline": "usual baseline"}
LOGITS = {"10K": 1e4, "100K": 1e5, "1M": 1e6}
SHARE = "1 %"  # of the logits that are positive


def over_logits(loss: str, palette: Palette) -> Figure:
    """Draw the time of a loss over the number of logits; a hollow dot is an estimate."""
    figure, axes = plt.subplots(figsize=(3.6, 2.9), layout="constrained")
    rows = [row for row in read_table(f"{loss} loss: time") if row["positives"] == SHARE]
    sizes = [LOGITS[row["logits"]] for row in rows]
    blue, red, _ = palette.series
    colours = (red, palette.rival, blue, blue, palette.point)
    for (column, name), colour, style in zip(METHODS.items(), colours, ("-", "-", ":", "-", "--"), strict=True):
        times = [milliseconds(row[column]) for row in rows]
        axes.plot(sizes, times, style, color=colour, linewidth=2.4 if name == "exact, compiled" else 1.4, label=name)
        for size, time, row in zip(sizes, times, rows, strict=True):
            estimated = row[column].startswith("skipped")
            axes.plot(size, time, "o", color=colour, markersize=4, markerfacecolor="none" if estimated else colour)
    axes.set(xscale="log", yscale="log", xlabel="logits")
    axes.set_xticks(sizes, list(LOGITS))
    axes.set_yticks([1, 100, 10_000], ["1 ms", "100 ms", "10 s"])
    axes.minorticks_off()
    axes.set_title(LOSSES[loss], fontsize=10, loc="left", fontweight="bold")
    axes.legend(loc="upper left", fontsize=8, handlelength=1.6)
    return figure


def per_step(palette: Palette) -> Figure:
    """Draw the time of a training step of each detector, divided by that with focal loss on the same candidates."""
    figure, axes = plt.subplots(figsize=(4.6, 3.1), layout="constrained")
    rows = read_table("T_iter")
    names = [row["detector"] for row in rows]
    colours = (*palette.series[:2], palette.point)
    for (column, label), colour in zip(CONTENDERS.items(), colours, strict=True):
        ratios = [float(re.findall(r"· ([\d.]+)", row[column])[0]) for row in rows]
        above = 3 if column == "rs/exact" else 2  # dots may cover each other
        axes.plot(ratios, names, "o", color=colour, markersize=7, label=label, zorder=above)
    axes.axvline(1, color=palette.faint, linewidth=1)
    axes.invert_yaxis()
    axes.set_xlim(0.5, 1.4)
    axes.set_xlabel("time of a step, focal loss on the same candidates = 1")
    axes.grid(axis="y", color=palette.faint, alpha=0.3)
    axes.tick_params(left=False)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8.5)
    return figure


if __name__ == "__main__":
    for name in LOSSES:
        save(f"losses-time-{name.lower()}", partial(over_logits, name))
    save("step-time", per_step)
