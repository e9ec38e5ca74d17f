"""Drawings of data flow: boxes on a grid, arrows between them."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from docs.figures.theme import Palette

WIDTH, HEIGHT = 1.72, 0.62  # of a box, in inches; a cell of the grid is 2.25 by 1


@dataclass(frozen=True)
class Box:
    """A part at ``column`` and ``row`` of the grid, the top row being 0; ``role`` is part, loss or input."""

    column: float
    row: float
    text: str
    role: str = "part"


@dataclass(frozen=True)
class Arrow:
    """An arrow between two boxes, by name, downwards, upwards or to the right; dashed if it carries no gradient."""

    start: str
    end: str
    text: str = ""
    detached: bool = False


def draw_flow(boxes: dict[str, Box], arrows: list[Arrow], palette: Palette) -> Figure:
    """Draw the boxes with their arrows."""
    columns = max(box.column for box in boxes.values()) + 1
    rows = max(box.row for box in boxes.values()) + 1
    figure, axes = plt.subplots(figsize=(2.25 * columns, 1.0 * rows + 0.1))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, 2.25 * columns), ylim=(-1.0 * rows, 0.1))
    axes.axis("off")
    for arrow in arrows:
        _draw_arrow(axes, boxes[arrow.start], boxes[arrow.end], arrow, palette)
    colours = {"part": palette.faint, "loss": palette.series[1], "input": palette.series[0]}
    for box in boxes.values():
        x, y = _centre(box)
        axes.add_patch(
            FancyBboxPatch(
                (x - WIDTH / 2, y - HEIGHT / 2),
                WIDTH,
                HEIGHT,
                boxstyle="round,pad=0.02,rounding_size=0.1",
                facecolor="none",
                edgecolor=colours[box.role],
                linewidth=1.4,
            )
        )
        axes.text(x, y, box.text, ha="center", va="center", fontsize=9.2, linespacing=1.25)
    return figure


def _centre(box: Box) -> tuple[float, float]:
    return 2.25 * (box.column + 0.5), -(box.row + 0.5)


def _draw_arrow(axes: Axes, start: Box, end: Box, arrow: Arrow, palette: Palette) -> None:
    (x1, y1), (x2, y2) = _centre(start), _centre(end)
    across = abs(x2 - x1) > 0.1
    if across:
        tail, head = (x1 + WIDTH / 2, y1), (x2 - WIDTH / 2, y2)
        bend = "arc3" if y1 == y2 else "arc,angleA=0,angleB=180,armA=14,armB=14,rad=6"
    else:
        side = -1 if y2 < y1 else 1
        tail, head = (x1, y1 + side * HEIGHT / 2), (x2, y2 - side * HEIGHT / 2)
        bend = "arc3"
    axes.annotate(
        "",
        xy=head,
        xytext=tail,
        arrowprops={
            "arrowstyle": "-|>",
            "color": palette.faint,
            "linestyle": "--" if arrow.detached else "-",
            "connectionstyle": bend,
            "shrinkA": 3,
            "shrinkB": 3,
            "linewidth": 1.1,
        },
    )
    if arrow.text:
        # On a straight line in its middle, on a bent one where it leaves its box.
        straight = y1 == y2 or not across
        x, y = ((tail[0] + head[0]) / 2, (tail[1] + head[1]) / 2) if straight else (tail[0] + 0.05, tail[1])
        axes.text(
            x if straight and across else x + 0.06,
            y + (0 if not across else 0.09 if straight or y2 < y1 else -0.11),  # off the line
            arrow.text,
            ha="center" if straight and across else "left",
            va="center",
            fontsize=8,
            color=palette.text,
        )
