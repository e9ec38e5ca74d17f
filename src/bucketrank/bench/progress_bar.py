"""A progress bar that shows the time left and disturbs the measurements as little as possible."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

REFRESH_SECONDS = 0.25


class ProgressBar:
    """Context manager that shows the current stage of a benchmark in the terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[doing]}", style="dim"),
            console=console,
            transient=True,
            # Refreshing in a thread of its own would disturb the measurements.
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
