"""A benchmark session: check settings, measure with a progress bar, print tables, write files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class BenchSettings(Protocol):
    """Settings that every benchmark has."""

    @property
    def device(self) -> str: ...


SettingsT = TypeVar("SettingsT", bound=BenchSettings)
BenchT = TypeVar("BenchT")
WIDTH = 160  # columns if the output is not a terminal; enough for every table

_SEND = (
    "Results from GPUs are listed in docs/gpu.md: please open an issue and attach {path}. The file holds the results,"
    " the machine, the versions and the commit."
)


def wide_console() -> Console:
    """Build a console wide enough for every table, even if the output is not a terminal."""
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
    console = wide_console()
    with ProgressBar(console) as progress:
        bench = measure(settings, progress)
    show(bench, console)
    paths = write(bench, out)
    for path in paths:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if device_type(settings.device) != "cpu":
        console.print(_SEND.format(path=paths[0]), highlight=False, soft_wrap=True)


# Fewer samples make quartiles meaningless.
MIN_ROUNDS = 3


def check_device(device: str) -> None:
    """Raise ValueError unless torch can use the device on this machine."""
    try:
        torch.zeros(1, device=device).item()
    except (AssertionError, ImportError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removesuffix(".")
        raise ValueError(
            f"--device: expected a device that torch can use here, got {device!r} ({reason}); "
            "install its driver and a build of torch for it, or choose --device cpu"
        ) from error


def device_type(device: str) -> str:
    """Return a device without its index.

    >>> device_type("cuda:1")
    'cuda'
    """
    return device.partition(":")[0]


def command_line(
    name: str,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    quick: Mapping[str, Any],
    spell: Mapping[str, Callable[[Any], str]],
) -> str:
    """Format the command ``name`` with the flags whose values in ``settings`` differ from ``defaults``.

    If all values of ``quick`` are set, the command has ``--quick`` instead of those flags. ``spell`` holds functions
    that format flag values; for a tuple, each of its values.

    >>> command_line("losses", {"sizes": (1, 2), "rounds": 5}, {"sizes": (1,), "rounds": 9}, {"rounds": 5}, {})
    'python -m benchmarks losses --quick --sizes 1,2'
    """
    is_quick = all(settings[flag] == value for flag, value in quick.items())
    defaults = {**defaults, **(quick if is_quick else {})}
    words = ["python -m benchmarks", name, *(["--quick"] if is_quick else [])]
    for setting, value in settings.items():
        flag = setting.replace("_", "-")
        write = spell.get(setting, str)
        if value == defaults[setting]:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            words += [f"--{flag}", ",".join(map(write, value))]
        else:
            words += [f"--{flag}", write(value)]
    return " ".join(words)


class Progress(Protocol):
    """Receiver of progress, such as :class:`benchmarks.session.ProgressBar`."""

    def begin(self, text: str, total: float) -> None:
        """Start a stage of ``total`` units."""

    def advance(self, text: str, amount: float) -> None:
        """Add ``amount`` units to the current stage; ``text`` names what runs."""


class MeasurementError(RuntimeError):
    """A contender failed; the message names the contender and the cell."""


REFRESH_SECONDS = 0.25


class ProgressBar:
    """Context manager that shows the current stage of a benchmark in the terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[doing]}", style="dim"),
            console=console,
            transient=True,
            # A refresh thread would disturb the measurements.
            auto_refresh=False,
        )
        self._task: TaskID | None = None
        self._drawn = 0.0

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, text: str, total: float) -> None:
        """Start a stage of ``total`` units."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=total, doing="")
        self._progress.refresh()

    def advance(self, text: str, amount: float) -> None:
        """Add ``amount`` units to the current stage; ``text`` names what runs."""
        if self._task is not None:
            self._progress.update(self._task, advance=amount, doing=text)
            # Drawing after every call would push the logits out of the processor's cache.
            if time.monotonic() > self._drawn + REFRESH_SECONDS:
                self._progress.refresh()
                self._drawn = time.monotonic()
