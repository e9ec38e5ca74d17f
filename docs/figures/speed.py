"""Time of the losses for a million logits, from the table of the benchmark page: python -m docs.figures.speed."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from docs.figures.benchmark import LOSSES, SHARE
from docs.figures.benchmark_tables import milliseconds, read_table
from docs.figures.theme import Palette, save

METHODS = {  # name in the figure: column of the benchmark page
    "focal loss": "focal loss",
    "exact, compiled": "exact, fused kernel",
    "exact, torch": "exact, torch ops",
    "bucketed, torch": "bucketed (paper)",
    "pairwise, torch": "pairwise (definition)",  # an estimate, as it would take too long
}


def in_words(milliseconds: float) -> str:
    """Return a time with two digits."""
    if milliseconds >= 1000:
        return f"≈ {milliseconds / 1000:.0f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def draw(palette: Palette) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(6.4, 2.3), sharey=True, layout="constrained")
    for axes, (loss, title) in zip(panels, LOSSES.items(), strict=True):
        (row,) = (row for row in read_table(f"{loss} loss: time") if (row["logits"], row["positives"]) == ("1M", SHARE))
        names, values = list(METHODS), [milliseconds(row[column]) for column in METHODS.values()]
        colours = [palette.faint, palette.series[0], palette.series[0], palette.series[1], palette.series[1]]
        axes.barh(names, values, color=colours, height=0.68)
        for position, value in enumerate(values):
            axes.text(value * 1.15, position, in_words(value), va="center", fontsize=8.5)
        axes.set_xscale("log")
        axes.set_xlim(1, 4e5)
        axes.set_xticks([])
        axes.minorticks_off()
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(left=False)
        axes.set_title(title, fontsize=9.5, loc="left", fontweight="bold")
    panels[0].invert_yaxis()  # both panels share it
    return figure


if __name__ == "__main__":
    save("speed", draw)
