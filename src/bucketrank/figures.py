"""Colours and matplotlib settings of all figures."""

from typing import Any

# Okabe and Ito's palette, colour-blind safe.
BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, VERMILION, PURPLE = "#E69F00", "#D55E00", "#CC79A7"
INK, GREY, GRID = "#333333", "#888888", "#E8E8E8"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": "#BBBBBB",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    # Fixed, so that the same numbers give the same file.
    "svg.hashsalt": "bucketrank",
}
