"""Reports of a run: console output, train.csv and validation.csv with their curves, and Lightning's loggers."""

from __future__ import annotations

import csv
import hashlib
import io
import math
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

from bucketrank.errors import MAX_QUOTED, DataError, RecipeError, printable
from bucketrank.output import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, STYLE, VERMILION, format_duration, say
from bucketrank.settings.choices import TRAIN_COLUMNS
from bucketrank.training.checkpoints import Progress
from bucketrank.training.optimiser import Schedule
from bucketrank.training.processes import is_first_process
from bucketrank.weights.atomic import disk_full_named, write, write_text

if TYPE_CHECKING:
    from lightning.fabric import Fabric

LINE_SECONDS = 30.0  # interval between output lines without a terminal
DRAW_SECONDS = 60.0  # interval between redraws of the curves
SMOOTHING = 0.95  # weight of earlier steps in the displayed losses
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY)  # curve colours
SMOOTHED_POINTS = 40  # points per bold curve


class RunLog:
    """Report the progress of a run, in its first process only.

    On a terminal a bar shows losses and remaining time; otherwise a line is printed every half minute. ``seconds`` in
    train.csv is the mean time of a step, without evaluations and checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        *,
        fabric: Fabric,
        schedule: Schedule,
        log_every: int,
        max_seconds: float | None = None,
    ) -> None:
        self.folder, self.console, self.fabric, self.schedule = folder, console, fabric, schedule
        self.log_every, self.max_seconds = log_every, max_seconds
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
            try:
                logger.finalize(status)
            except Exception as error:  # noqa: BLE001, PERF203 (as in _log: a lost connection must not cost the weights)
                sys.stderr.write(
                    f"bucketrank: trainer.loggers: {type(logger).__name__} failed at the end ({_reason(error)}); "
                    "train.csv and validation.csv have all numbers\n"
                )

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
            total = self.schedule.total_steps  # a run with a time budget plans it again after each epoch
            self._bar.update(
                self._task, completed=progress.step, total=total, description=epoch, left=left, losses=losses
            )
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
                sys.stderr.write(
                    f"bucketrank: trainer.loggers: {type(logger).__name__} failed at step {step} ({_reason(error)}); "
                    "the run continues without it, and train.csv and validation.csv have all numbers\n"
                )

    def _time_left(self, progress: Progress) -> str:
        """Estimate the remaining time, evaluations included."""
        done = progress.step - self._first_step
        rest = self.schedule.total_steps - progress.step
        seconds = rest * (time.monotonic() - self._began) / max(done, 1)
        if self.max_seconds is not None:  # the first steps are not planned by time yet
            seconds = min(seconds, max(0.0, self.max_seconds - progress.seconds))
        return f"{format_duration(seconds)} left"


def require_loggers(names: Sequence[str]) -> None:
    """Raise RecipeError if the package of a logger is not installed."""
    for name in names:
        if name != "csv" and find_spec(name) is None:
            raise RecipeError(f"trainer.loggers: {name} needs the package {name}; install with: pip install {name}")


def build_loggers(names: Sequence[str], folder: Path) -> list[Any]:
    """Build Lightning's loggers by name, in the first process; each writes to its own folder inside the run folder.

    Raises RecipeError if one cannot start.
    """
    return [_build_logger(name, folder) for name in names] if is_first_process() else []


def _build_logger(name: str, folder: Path) -> Any:
    try:
        return _LOGGERS[name](folder)
    except Exception as error:
        raise RecipeError(
            f"trainer.loggers: {name} cannot start ({_reason(error)}); set it up or leave it out"
        ) from error


def _reason(error: Exception) -> str:
    """Return the class and the first line of a foreign error."""
    return printable(f"{type(error).__name__}: {error}".partition("\n")[0])[:MAX_QUOTED]


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

    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:  # a database, because MLflow no longer writes plain files
        database = folder / "mlflow" / "mlflow.db"
        database.parent.mkdir(exist_ok=True)
        uri = f"sqlite:///{database.absolute().as_posix()}"
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


class CsvTable:
    """A CSV file with a column ``step``, which grows during a run and is cut back to a checkpoint on resume."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []  # empty until the file is written or read

    def add(self, row: dict[str, float | int]) -> None:
        """Append a row; rewrite the file if the row has new columns. The row is flushed to the system on return."""
        cells = {name: _cell(value) for name, value in row.items()}
        if not set(cells) <= set(self._columns):
            rows = self.rows()
            known = list(rows[0]) if rows else []
            self._write([*known, *(name for name in cells if name not in known)], [*rows, cells])
            return
        with disk_full_named(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns, restval="", lineterminator="\n").writerow(cells)

    def rows(self) -> list[dict[str, str]]:
        """Return all rows as strings."""
        if not self.path.exists():
            return []
        try:
            with self.path.open(encoding="utf-8", newline="") as file:
                return [row for row in csv.DictReader(file) if (row.get("step") or "").isdecimal()]
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(
                f"{self.path}: expected the CSV table of a run, got a damaged file ({error}); delete it to continue "
                "without the earlier rows"
            ) from error

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of a column without its empty cells."""
        pairs = [(int(row["step"]), float(row[name])) for row in self.rows() if row.get(name)]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def cut(self, step: int) -> None:
        """Remove the rows after ``step``, and truncated rows."""
        self._replace([row for row in self._whole_rows() if int(row["step"]) <= step])

    def restart_epoch(self, epochs: int, *, old: int, new: int) -> None:
        """Keep the rows of the first ``epochs``, and rescale their steps from ``old`` to ``new`` steps per epoch.

        If several rows get the same step, the last one stays. Rows whose steps already lie in their epochs stay as they
        are, because a run that is killed before its next checkpoint does this twice.
        """
        rows = [row for row in self._whole_rows() if int(row["epoch"]) <= epochs]
        if any(math.ceil(int(row["step"]) / new) != int(row["epoch"]) for row in rows):
            steps = [str(math.ceil(int(row["step"]) * new / old)) for row in rows]
            rows = list({step: row | {"step": step} for step, row in zip(steps, rows, strict=True)}.values())
        self._replace(rows)

    def _whole_rows(self) -> list[dict[str, str]]:
        return [row for row in self.rows() if None not in row.values()]

    def _replace(self, rows: list[dict[str, str]]) -> None:
        if rows:
            self._write(list(rows[0]), rows)
        else:
            self.path.unlink(missing_ok=True)
            self._columns = []

    def _write(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())
        self._columns = columns


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.8g}"


def draw_curves(train: CsvTable, validation: CsvTable, path: Path) -> None:
    """Draw the losses on the left and AP on the right; write nothing without rows."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    def means(steps: list[int], values: list[float]) -> list[list[float]]:
        parts = min(SMOOTHED_POINTS, len(steps))
        return [[float(np.mean(part)) for part in np.array_split(column, parts)] for column in (steps, values)]

    rows = train.rows()
    if not rows:
        return
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        terms = [name for name in rows[0] if name not in TRAIN_COLUMNS]
        for name, colour in zip(["loss", *terms], (INK, *COLOURS * 3), strict=False):
            steps, values = train.column(name)
            left.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
            left.plot(*means(steps, values), color=colour, label=name, linewidth=2.0 if name == "loss" else 1.2)
        left.set(xlabel="step", ylabel="loss, moving mean in bold", ylim=(0, None))
        left.legend(frameon=False, fontsize=7, ncols=2)
        evaluations = validation.rows()
        names = [name for name in (evaluations[0] if evaluations else {}) if name.endswith(("/AP", "/AP50", "/AP75"))]
        for name, colour in zip(names, COLOURS, strict=False):
            steps, values = validation.column(name)
            right.plot(steps, [100 * value for value in values], color=colour, label=name, marker="o", markersize=3)
        right.set(xlabel="step", ylabel="AP in per cent", ylim=(0, None))
        if names:
            right.legend(frameon=False, fontsize=7)
        write(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))
