"""Draws one figure twice, for light and for dark pages, as SVG with the same bytes every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

ASSETS = Path(__file__).parents[1] / "assets"


@dataclass(frozen=True)
class Palette:
    """The colours of one page scheme."""

    text: str
    faint: str
    band: str
    series: tuple[str, str, str]
    point: str
    rival: str


PALETTES = {
    "light": Palette("#2b3540", "#9aa7b4", "#12355b", ("#1f6aa5", "#c8553d", "#3f8f5f"), "#55616d", "#a0569c"),
    "dark": Palette("#dfe6ee", "#77869a", "#9cc3ea", ("#7db9e8", "#f0937a", "#86d3a2"), "#aab6c3", "#dc9fd8"),
}


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
