"""A bench from its settings to its files, with a bar meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from bucketrank.bench.progress import Bar
from bucketrank.bench.study import Progress

Settings = TypeVar("Settings")
Study = TypeVar("Study")


def present(
    settings: Settings,
    out: Path,
    *,
    run: Callable[[Settings, Progress], Study],
    show: Callable[[Study, Console], None],
    write: Callable[[Study, Path], list[Path]],
) -> None:
    """Runs, prints the tables, writes the files."""
    console = Console()
    if not console.is_terminal:
        # Into a file or a log: as wide as the tables are.
        console = Console(width=160)
    with Bar(console) as progress:
        study = run(settings, progress)
    show(study, console)
    for path in write(study, out):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
