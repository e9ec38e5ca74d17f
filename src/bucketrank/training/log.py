"""Reports of a run: console output, the tables train.csv and validation.csv, and Lightning's loggers."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from bucketrank.console import format_duration
from bucketrank.errors import MAX_QUOTED, RecipeError, printable
from bucketrank.training.checkpoints import Progress
from bucketrank.training.optimiser import Schedule
from bucketrank.training.tables import CsvTable, draw_curves

if TYPE_CHECKING:
    from lightning.fabric import Fabric

LINE_SECONDS = 30.0  # interval between output lines without a terminal
DRAW_SECONDS = 60.0  # interval between redraws of the curves
SMOOTHING = 0.95  # weight of earlier steps in the displayed losses


class RunLog:
    """Report the progress of a run, in its first process only.

    On a terminal a bar shows losses and remaining time; otherwise a line is printed every half minute. ``seconds`` in
    train.csv is the mean time of a step, without evaluations and checkpoints.
    """

    def __init__(self, folder: Path, console: Console, *, fabric: Fabric, schedule: Schedule, log_every: int) -> None:
        self.folder, self.console, self.fabric, self.schedule = folder, console, fabric, schedule
        self.log_every = log_every
        self.active = fabric.is_global_zero
        self.train, self.validation = CsvTable(folder / "train.csv"), CsvTable(folder / "validation.csv")
        self._bar: ProgressBar | None = None
        self._task: Any = None
        self._smooth: dict[str, float] = {}
        self._first_step = self._steps_since_row = 0
        self._began = self._row_began = self._printed = self._drawn = time.monotonic()

    def cut(self, progress: Progress | None) -> None:
        """Remove the rows after a checkpoint, or all rows without one; some may be left from a killed run."""
        step = -1 if progress is None else progress.step
        evaluated = -1 if progress is None else progress.step - bool(progress.batch)
        if self.active:
            self.train.cut(step)
            self.validation.cut(evaluated)

    def restart_epoch(self, progress: Progress, *, old_steps: int) -> None:
        """Remove the rows of the current epoch, and rescale the others to a new number of steps per epoch."""
        if self.active:
            for table in (self.train, self.validation):
                table.restart_epoch(progress.epoch, old=old_steps, new=self.schedule.steps_per_epoch)

    def start(self, progress: Progress) -> None:
        """Start the clocks and the bar."""
        self._began = self._row_began = self._printed = self._drawn = time.monotonic()
        self._first_step = progress.step
        if self.active and self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[losses]}", style="dim"),
            )
            self._bar = ProgressBar(*columns, console=self.console, transient=True)
            total = self.schedule.total_steps
            self._task = self._bar.add_task("training", total=total, completed=progress.step, left="", losses="")
            self._bar.start()

    def stop(self, status: str) -> None:
        """Remove the bar and flush the loggers; ``status`` is Lightning's "success" or "failed"."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        for logger in self.fabric.loggers:
            logger.finalize(status)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in this context from the time of the steps."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._row_began += time.monotonic() - began

    def step(self, progress: Progress, terms: Mapping[str, float]) -> None:
        """Report a step: its row in train.csv if one is due, and the bar or a line."""
        if not self.active:
            return
        self._steps_since_row += 1
        first_or_last = progress.step in (1, self.schedule.total_steps)
        if first_or_last or progress.step % self.log_every == 0:
            self._add_row(progress, terms)
        for name, value in terms.items():
            self._smooth[name] = SMOOTHING * self._smooth.get(name, value) + (1 - SMOOTHING) * value
        now = time.monotonic()
        if self._bar is None and now < self._printed + LINE_SECONDS:
            return
        losses = "  ".join(f"{name} {value:.3f}" for name, value in self._smooth.items())
        left = self._time_left(progress)
        if self._bar is not None:
            epoch = f"epoch {progress.epoch + 1}/{self.schedule.total_epochs}"
            self._bar.update(self._task, completed=progress.step, description=epoch, left=left, losses=losses)
        else:
            self._printed = now
            say(self.console, f"step {progress.step}/{self.schedule.total_steps}  {left}  {losses}")

    def evaluating(self) -> None:
        """Show that an evaluation runs."""
        if self._bar is not None:
            self._bar.update(self._task, description="evaluating")

    def epoch(self, progress: Progress, *, evaluated: bool) -> None:
        """Report the end of an epoch: a row in validation.csv if it was evaluated, and a line."""
        if not self.active:
            return
        metrics = progress.metrics if evaluated else {}
        if evaluated:
            place = {"step": progress.step, "epoch": progress.epoch + 1}
            self.validation.add({**place, **metrics, "threshold": progress.threshold})
            self._log({name: value for name, value in metrics.items() if value == value}, progress.step)
        numbers = [
            f"{'mask ' if name.startswith('masks') else ''}{name.partition('/')[2]} {100 * value:.1f}"
            for name, value in metrics.items()
            if name.endswith(("/AP", "/AP50", "/AP75"))
        ]
        epoch = f"epoch {progress.epoch + 1}/{self.schedule.total_epochs}"
        say(self.console, f"{epoch}  {'  '.join(numbers)}  {self._time_left(progress)}")
        if time.monotonic() - self._drawn > DRAW_SECONDS:
            self.draw_curves()
            self._drawn = time.monotonic()

    def draw_curves(self) -> None:
        """Draw both tables to curves.png."""
        draw_curves(self.train, self.validation, self.folder / "curves.png")

    def _add_row(self, progress: Progress, terms: Mapping[str, float]) -> None:
        now = time.monotonic()
        seconds = (now - self._row_began) / self._steps_since_row
        self._row_began, self._steps_since_row = now, 0
        row = {"loss": sum(terms.values()), **terms, "lr": self.schedule.rate(progress.step - 1), "seconds": seconds}
        self.train.add({"step": progress.step, "epoch": progress.epoch + 1, **row})
        self._log(row, progress.step)

    def _log(self, row: Mapping[str, float], step: int) -> None:
        """Pass a row to each logger. One that fails is removed with a message; the tables have the same numbers."""
        loggers = self.fabric.loggers
        for logger in list(loggers):
            try:
                logger.log_metrics(dict(row), step=step)
            except Exception as error:  # noqa: BLE001, PERF203 (four logging libraries share no narrower class)
                loggers.remove(logger)
                reason = printable(f"{type(error).__name__}: {error}".partition("\n")[0])[:MAX_QUOTED]
                sys.stderr.write(
                    f"bucketrank: trainer.loggers: {type(logger).__name__} failed at step {step} ({reason}); the run "
                    "continues without it, and train.csv and validation.csv have all numbers\n"
                )

    def _time_left(self, progress: Progress) -> str:
        """Estimate the remaining time, evaluations included."""
        done = progress.step - self._first_step
        rest = self.schedule.total_steps - progress.step
        return f"{format_duration(rest * (time.monotonic() - self._began) / max(done, 1))} left"


def say(console: Console, text: str) -> None:
    """Print plain text without markup, highlighting or hard line breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def require_loggers(names: Sequence[str]) -> None:
    """Raise RecipeError if the package of a logger is not installed."""
    for name in names:
        if name != "csv" and find_spec(name) is None:
            raise RecipeError(f"trainer.loggers: {name} needs the package {name}; install with: pip install {name}")


def build_loggers(names: Sequence[str], folder: Path) -> list[Any]:
    """Build Lightning's loggers by name; each writes to its own folder inside the run folder."""
    return [_LOGGERS[name](folder) for name in names]


def _tensorboard(folder: Path) -> Any:
    from lightning.fabric.loggers.tensorboard import TensorBoardLogger

    return TensorBoardLogger(folder, name=None, version="tensorboard")


def _wandb(folder: Path) -> Any:
    from lightning.pytorch.loggers import WandbLogger

    # The id depends only on the run folder, so a resumed run continues its curves.
    number = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    project = os.environ.get("WANDB_PROJECT", "bucketrank")
    return WandbLogger(name=folder.name, save_dir=folder, project=project, id=number, resume="allow")


def _mlflow(folder: Path) -> Any:
    from lightning.pytorch.loggers import MLFlowLogger

    uri = os.environ.get("MLFLOW_TRACKING_URI", (folder / "mlruns").absolute().as_uri())
    return MLFlowLogger(experiment_name="bucketrank", run_name=folder.name, tracking_uri=uri)


def _csv(folder: Path) -> Any:
    from lightning.fabric.loggers.csv_logs import CSVLogger

    return CSVLogger(folder, name="csv")


_LOGGERS: dict[str, Callable[[Path], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "csv": _csv,
}
