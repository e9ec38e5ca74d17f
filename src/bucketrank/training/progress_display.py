"""The progress of a run on the console: a bar with losses and the time left, and a line after every epoch."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bucketrank.console import format_duration
from bucketrank.training.detector_module import DetectorModule

LINE_SECONDS = 30.0  # between two lines without a terminal
SMOOTHING = 0.95  # weight of the earlier steps in the losses shown


class ProgressDisplay(pl.Callback):
    """Shows a bar on a terminal, and a line every half minute otherwise."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._smooth: dict[str, float] = {}
        self._began = self._printed = 0.0
        self._first = 0
        self._printed_metrics: dict[str, float] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = _of(pl_module)
        self._began = self._printed = time.monotonic()
        self._first = module.position.step
        if trainer.is_global_zero and self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[losses]}", style="dim"),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task(
                "training", total=module.schedule.total_steps, completed=self._first, left="", losses=""
            )
            self._bar.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = _of(pl_module)
        now = time.monotonic()
        for name, term in module.terms.items():
            value = float(term)
            self._smooth[name] = SMOOTHING * self._smooth.get(name, value) + (1 - SMOOTHING) * value
        if not trainer.is_global_zero or (self._bar is None and now < self._printed + LINE_SECONDS):
            return
        losses = "  ".join(f"{name} {value:.3f}" for name, value in self._smooth.items())
        step, total = module.position.step, module.schedule.total_steps
        left = f"{format_duration(self._left(module))} left"
        if self._bar is not None:
            epoch = f"epoch {module.position.epoch + 1}/{trainer.max_epochs}"
            self._bar.update(self._task, completed=step, description=epoch, left=left, losses=losses)
        else:
            self._printed = now
            self.console.print(f"step {step}/{total}  {left}  {losses}", highlight=False, markup=False, soft_wrap=True)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description="evaluating")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = _of(pl_module)
        if trainer.is_global_zero:
            fresh = module.metrics if module.metrics is not self._printed_metrics else {}
            self._printed_metrics = module.metrics
            numbers = [
                f"{'mask ' if name.startswith('masks') else ''}{name.partition('/')[2]} {100 * value:.1f}"
                for name, value in fresh.items()
                if name.endswith(("/AP", "/AP50", "/AP75"))
            ]
            left = f"{format_duration(self._left(module))} left"
            text = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  {'  '.join(numbers)}  {left}"
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _left(self, module: DetectorModule) -> float:
        """Return the seconds left, evaluations included."""
        done = module.position.step - self._first
        rest = module.schedule.total_steps - module.position.step
        return rest * (time.monotonic() - self._began) / max(done, 1)


def _of(module: pl.LightningModule) -> DetectorModule:
    if not isinstance(module, DetectorModule):
        raise TypeError(f"ProgressDisplay: expected a DetectorModule, got {type(module).__name__}")
    return module
