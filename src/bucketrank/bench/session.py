"""A whole benchmark: measure with a progress bar, print the tables, write the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console

from bucketrank.bench.flags import device_type
from bucketrank.bench.measurement import Progress
from bucketrank.bench.progress_bar import ProgressBar


class BenchSettings(Protocol):
    """Settings of a benchmark, as far as every benchmark has them."""

    @property
    def device(self) -> str: ...


SettingsT = TypeVar("SettingsT", bound=BenchSettings)
BenchT = TypeVar("BenchT")
WIDTH = 160  # columns when the output is no terminal, enough for every table

_SEND = (
    "Results from GPUs are listed in docs/gpu.md: please open an issue and attach {path}. The file holds the results,"
    " the machine, the versions and the commit."
)


def console_of_bench() -> Console:
    """Return a console that is wide enough for every table, also if the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def present(
    settings: SettingsT,
    out: Path,
    *,
    measure: Callable[[SettingsT, Progress], BenchT],
    show: Callable[[BenchT, Console], None],
    write: Callable[[BenchT, Path], list[Path]],
) -> None:
    """Measure, print the tables with ``show``, and ``write`` the files to the folder ``out``, the JSON first."""
    console = console_of_bench()
    with ProgressBar(console) as progress:
        bench = measure(settings, progress)
    show(bench, console)
    paths = write(bench, out)
    for path in paths:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if device_type(settings.device) != "cpu":
        console.print(_SEND.format(path=paths[0]), highlight=False, soft_wrap=True)
