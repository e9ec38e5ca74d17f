"""Draws one figure twice, for light and for dark pages, as SVG with the same bytes every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from docs.figures.palette import PALETTES, Palette

__all__ = ["ASSETS", "PALETTES", "Palette", "mark", "save"]

ASSETS = Path(__file__).parents[1] / "assets"


def mark(axes: Axes, at: ArrayLike, palette: Palette) -> None:
    """Dashed lines over the whole height."""
    across = axes.get_xaxis_transform()
    axes.vlines(at, 0, 1, colors=palette.faint, linestyles=(0, (3, 3)), linewidth=0.7, transform=across)


def save(name: str, draw: Callable[[Palette], Figure]) -> None:
    """Write ``name-light.svg`` and ``name-dark.svg`` into the documentation's assets."""
    for scheme, palette in PALETTES.items():
        settings: dict[Any, Any] = {
            "axes.edgecolor": palette.faint,
            "axes.labelcolor": palette.text,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "legend.frameon": False,
            "svg.fonttype": "path",  # looks the same whatever fonts the reader has
            "svg.hashsalt": name,
            "text.color": palette.text,
            "xtick.color": palette.text,
            "ytick.color": palette.text,
        }
        with mpl.rc_context(settings):
            figure = draw(palette)
            path = ASSETS / f"{name}-{scheme}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
            plt.close(figure)
        print(path.relative_to(ASSETS.parents[1]))
