"""Colours and settings of matplotlib that all figures share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

INK = "#333333"
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
