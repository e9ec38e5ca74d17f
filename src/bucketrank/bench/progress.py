"""A bar with the time left."""

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

REFRESH = 0.25


class Bar:
    """Shows one stage after the other; a context manager."""

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
            # On a thread of its own it would disturb what is measured.
            auto_refresh=False,
        )
        self._task: TaskID | None = None
        self._drawn = 0.0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, text: str, total: float) -> None:
        """A new stage."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=total, doing="")
        self._progress.refresh()

    def advance(self, text: str, amount: float) -> None:
        """``amount`` of the stage is done; ``text`` says what runs."""
        if self._task is not None:
            self._progress.update(self._task, advance=amount, doing=text)
            # Drawing between any two calls would push the logits out of the processor's cache.
            if time.monotonic() > self._drawn + REFRESH:
                self._progress.refresh()
                self._drawn = time.monotonic()
