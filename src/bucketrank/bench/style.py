"""How the figures of the benches look."""

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
    # The same study gives the same file.
    "svg.hashsalt": "bucketrank",
}


def save(figure: Figure, out: Path, name: str) -> list[Path]:
    """``name``.png and ``name``.svg in ``out``."""
    paths = [out / f"{name}.png", out / f"{name}.svg"]
    figure.savefig(paths[0], dpi=200)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths
