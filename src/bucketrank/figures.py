"""Colours and matplotlib settings of all figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, colour-blind safe.
BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, VERMILION, PURPLE = "#E69F00", "#D55E00", "#CC79A7"
INK, DARK, GREY, LIGHT = "#333333", "#444444", "#888888", "#AAAAAA"
GRID = "#E8E8E8"
# Losses and methods have the same colours in all figures.
LOSS_COLOURS = {
    "rs": BLUE,
    "rsq": SKY,
    "ap": GREEN,
    "focal": VERMILION,
    "ce": VERMILION,
    "qfl": ORANGE,
    "mal": ORANGE,
    "vfl": PURPLE,
    "bce": GREY,
    "iabce": YELLOW,
    "dr": PURPLE,
    "alrp": SKY,
}
METHOD_COLOURS = {"exact": BLUE, "bucketed": ORANGE, "pairwise": VERMILION}
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


def save_figure(figure: Figure, out: Path, name: str) -> list[Path]:
    """Write ``name``.png and ``name``.svg to the folder ``out`` and return both paths."""
    paths = [out / f"{name}.png", out / f"{name}.svg"]
    figure.savefig(paths[0], dpi=200)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths
