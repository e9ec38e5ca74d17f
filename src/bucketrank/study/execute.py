"""Runs the trainings of a study one after the other, each in a process of its own; what is done is not done again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bucketrank.study.runs import Run, StudyError
from bucketrank.training.progress import in_words

SHOWN = 400  # characters of a training's last words


class StoppedError(StudyError):
    """A training was asked to stop, by Ctrl-C; it has a checkpoint to go on from."""


@dataclass
class Queue:
    """How far the study is, and what has failed."""

    console: Console
    total: int
    done: int = 0

    def __post_init__(self) -> None:
        self.failed: dict[str, str] = {}
        self._seen: set[str] = set()
        self._durations: list[float] = []  # of the trainings of this session

    def train(self, runs: Sequence[Run]) -> None:
        """Train what is not trained yet; a failure is noted, and the next one's turn comes."""
        for run in runs:
            if run.name in self._seen:
                continue
            self._seen.add(run.name)
            if not run.finished:
                self._train(run)
            self.done += 1
            told = self.failed.get(run.name) or f"AP {run.metric():.1f}"
            self._say(f"{self.done} of {self.total}  {run.name}  {told}{self._left()}")

    def _train(self, run: Run) -> None:
        log = run.out / "logs" / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        words = [sys.executable, "-m", "bucketrank.cli", *run.words, "--resume"]
        with log.open("a", encoding="utf-8") as file, self._bar(run.name):
            process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
            status = _wait(process)
        if status == 130:
            raise StoppedError(f"stopped in {run.name}; the same command goes on from there")
        if status != 0:
            self.failed[run.name] = f"failed (see {log}): {_last_words(log)}"
            return
        self._durations.append(time.monotonic() - began)

    def _left(self) -> str:
        if not self._durations or self.done >= self.total:
            return ""
        mean = sum(self._durations) / len(self._durations)
        return f"  {in_words(mean * (self.total - self.done))} left"

    def _bar(self, name: str) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        bar.add_task(name, total=self.total, completed=self.done)
        return bar

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit status; Ctrl-C reaches the training too, which ends after its step."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # noqa: PERF203 (rare)
            continue


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:SHOWN] if lines else "it said nothing"
