"""A whole benchmark: measure with a progress bar, print the tables, write the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from bucketrank.bench.measurement import Progress
from bucketrank.bench.progress_bar import ProgressBar

SettingsT = TypeVar("SettingsT")
BenchT = TypeVar("BenchT")
WIDTH = 160  # columns when the output is no terminal, enough for every table


def present(
    settings: SettingsT,
    out: Path,
    *,
    measure: Callable[[SettingsT, Progress], BenchT],
    show: Callable[[BenchT, Console], None],
    write: Callable[[BenchT, Path], list[Path]],
) -> None:
    """Measure, print the tables with ``show``, and ``write`` the files to the folder ``out``."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    with ProgressBar(console) as progress:
        bench = measure(settings, progress)
    show(bench, console)
    for path in write(bench, out):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
