"""Terminal output and figures: plain text, durations, the progress bar, colours and matplotlib settings."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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


def say(console: Console, text: str, *, style: str | None = None) -> None:
    """Print plain text without markup, highlighting or hard line breaks."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def format_duration(seconds: float) -> str:
    """Format a duration for people.

    >>> format_duration(42), format_duration(75), format_duration(3 * 3600 + 120)
    ('42 s', '1 min 15 s', '3 h 2 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def progress_bar(console: Console) -> Progress:
    """Create a progress bar that disappears when it is done; nothing is shown if the output is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
