"""Time of the losses for a million logits: python -m docs.figures.speed."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from docs.figures.theme import Palette, save

# Milliseconds, forward and backward, for 1,000,000 logits, 1 % of them positive, on two CPU cores: numbers from the
# benchmark page, commit 2efee9d; pairwise is an estimate, as it would take too long.
FOCAL = 13.6
TIMES = {
    "AP loss": {"exact, compiled": 7.07, "exact, torch": 29.0, "bucketed, torch": 339.0, "pairwise, torch": 22_400.0},
    "Rank & Sort loss": {
        "exact, compiled": 11.4,
        "exact, torch": 65.5,
        "bucketed, torch": 870.0,
        "pairwise, torch": 22_700.0,
    },
}


def in_words(milliseconds: float) -> str:
    """Return a time with two digits."""
    if milliseconds >= 1000:
        return f"≈ {milliseconds / 1000:.0f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def draw(palette: Palette) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(6.4, 2.3), sharey=True, layout="constrained")
    for axes, (title, times) in zip(panels, TIMES.items(), strict=True):
        names, values = ["focal loss", *times], [FOCAL, *times.values()]
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
