"""Terminal output that the commands share: plain text, durations and the progress bar."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


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
