"""The queue of a study: its runs are trained one after another, each in its own process; finished runs are skipped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bucketrank.console import format_duration
from bucketrank.study.study_run import StudyError, StudyRun

INTERRUPTED = 130  # exit status of a run that Ctrl-C stopped
RESUME = "repeat the same command to resume"
SHOWN = 400  # most characters of a failed run's last line


class StoppedError(StudyError):
    """The study was stopped by Ctrl-C or SIGTERM; its run is finished or has a checkpoint to resume from."""


@dataclass
class RunQueue:
    """The progress of a study of ``total`` runs, and the errors of the runs that ``failed``, by name.

    ``total_length`` is the sum of the lengths of all runs, by which the time left is estimated.
    """

    console: Console
    total: int
    total_length: float
    done: int = 0

    def __post_init__(self) -> None:
        self.failed: dict[str, str] = {}
        self._seen: set[str] = set()
        self._done_length = 0.0
        self._trained_length = 0.0  # without the runs that were finished before
        self._seconds = 0.0  # which the training took

    def train(self, runs: Sequence[StudyRun]) -> None:
        """Train the runs that are not finished; a failure is recorded and the next run starts."""
        for run in runs:
            if run.name in self._seen:
                continue
            self._seen.add(run.name)
            if not run.finished:
                self._train(run)
            self.done += 1
            self._done_length += run.length
            outcome = self.failed.get(run.name) or f"AP {run.metric():.1f}"
            self._print(f"{self.done} of {self.total}  {run.name}  {outcome}{self._time_left()}")

    def _train(self, run: StudyRun) -> None:
        log = run.out / "logs" / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "bucketrank.cli", *run.arguments, "--resume"]
        with log.open("a", encoding="utf-8") as file, self._bar(run.name):
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            status, stopped = _wait(process)
        if stopped or status == INTERRUPTED:  # also if the run was about to end anyway
            raise StoppedError(f"stopped in {run.name}; {RESUME}")
        if status != 0:
            self.failed[run.name] = f"failed (see {log}): {_last_line(log)}"
            return
        self._seconds += time.monotonic() - began
        self._trained_length += run.length

    def _time_left(self) -> str:
        if not self._trained_length or self.done >= self.total:
            return ""
        left = self._seconds / self._trained_length * (self.total_length - self._done_length)
        return f"  {format_duration(left)} left"

    def _bar(self, name: str) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        bar.add_task(name, total=self.total, completed=self.done)
        return bar

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Return the exit status of the run and whether the study was asked to stop, after the run has ended its step.

    Ctrl-C reaches the run and the study. SIGTERM reaches the study alone, which passes it on.
    """
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        while True:
            try:
                return process.wait(), stopped
            except KeyboardInterrupt:  # noqa: PERF203 (rare)
                stopped = True
    finally:
        signal.signal(signal.SIGTERM, before)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:SHOWN] if lines else "the log is empty"
