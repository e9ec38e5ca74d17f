"""The files that a run writes while it trains: tables, checkpoints, the best weights."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from bucketrank.settings import Recipe
from bucketrank.training.checkpoints import Checkpoints
from bucketrank.training.csv_table import CsvTable
from bucketrank.training.data_module import DataModule
from bucketrank.training.detector_module import DetectorModule
from bucketrank.training.launch import is_first_process
from bucketrank.training.loggers import log_row
from bucketrank.training.schedule import restore_optimiser
from bucketrank.training.stop_signals import Interrupted, StopSignals
from bucketrank.training.training_curves import draw_curves
from bucketrank.weights.atomic import write_text
from bucketrank.weights.files import Meta, save_weights

DRAW_SECONDS = 60.0  # between two drawings of the curves


class RunKeeper(pl.Callback):
    """Counts steps, writes the two tables and the checkpoints, and ends the run at its last step.

    A checkpoint is written at the end of every epoch, before every evaluation, and in between at the interval of the
    settings, always after a whole step of the optimiser.
    """

    def __init__(
        self,
        folder: Path,
        *,
        recipe: Recipe,
        batches: int,
        meta: Callable[..., Meta],
        stop: StopSignals,
    ) -> None:
        self.folder, self.recipe, self.settings, self.stop = folder, recipe, recipe.trainer, stop
        self.batches, self.accumulate = batches, recipe.schedule.accumulate  # batches per epoch and per step
        self.meta = meta
        self.train, self.validation = CsvTable(folder / "train.csv"), CsvTable(folder / "validation.csv")
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.best = -math.inf
        self.stale = 0  # evaluations since the best one
        self._restored: dict[str, Any] | None = None
        self._saved = self._began = self._step_ended = self._drawn = time.monotonic()
        self._steps_since_row = 0

    def restore(self, state: dict[str, Any], module: DetectorModule, *, changed_data: bool = False) -> None:
        """Restore the state of a checkpoint; that of the optimiser follows when Lightning has created it.

        If changed data has another number of batches, the run continues at the start of the epoch in which it stopped,
        with the steps counted as if all earlier epochs had been as long as this one: the schedule follows the step.
        """
        module.detector.load_state_dict(state["model"])
        position = module.position
        position.epoch, position.batch, position.step = (state[name] for name in ("epoch", "batch", "step"))
        old_batches = state["batches"]
        restarted = changed_data and old_batches != self.batches
        steps = module.schedule.steps_per_epoch
        if restarted:
            position.batch, position.step = 0, position.epoch * steps
        module.metrics, module.threshold = state["metrics"], state["threshold"]
        self.best, self.stale = state["best"], state["stale"]
        if module.average is not None:
            module.average.restore(state["average"])
        self._restored = state
        if not is_first_process():
            return
        if restarted:
            for table in (self.train, self.validation):
                table.restart_epoch(position.epoch, old=math.ceil(old_batches / self.accumulate), new=steps)
            return
        self.train.cut(position.step)
        self.validation.cut(position.step if not position.batch else position.step - 1)

    def save(self, trainer: pl.Trainer, module: DetectorModule) -> None:
        """Write a checkpoint, in the first process only: all have the same state."""
        if not trainer.is_global_zero:
            return
        position = module.position
        optimiser, precision = trainer.optimizers, trainer.precision_plugin.state_dict()
        self.checkpoints.save(
            {
                "epoch": position.epoch,
                "batch": position.batch,
                "step": position.step,
                "batches": self.batches,
                "recipe": self.recipe.to_dict(),
                "model": module.detector.state_dict(),
                # Until training starts, these are the restored ones.
                "optimiser": optimiser[0].state_dict() if self._restored is None else self._restored["optimiser"],
                "precision": precision if self._restored is None else self._restored["precision"],
                "metrics": module.metrics,
                "threshold": module.threshold,
                "best": self.best,
                "stale": self.stale,
                "average": None if module.average is None else module.average.state(),
            }
        )
        self._saved = time.monotonic()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # All processes have been started and have their own handlers.
        self.stop.deliver()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._restored is not None:
            restore_optimiser(trainer.optimizers[0], self._restored["optimiser"])
            trainer.precision_plugin.load_state_dict(self._restored["precision"])
            self._restored = None
        _share_device(_module(pl_module))
        self._saved = self._began = self._step_ended = time.monotonic()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began += time.monotonic() - self._step_ended  # an evaluation does not count as time of the steps
        # The last epoch is always evaluated.
        last = trainer.current_epoch + 1 == trainer.max_epochs
        trainer.check_val_every_n_epoch = 1 if last else self.settings.validate_every

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        module = _module(pl_module)
        position = module.position
        position.batch += 1
        if position.batch % self.accumulate and position.batch < self.batches:
            return
        position.step += 1
        if module.average is not None:
            module.average.update(module.detector)
        self._steps_since_row += 1
        done = position.step >= module.schedule.total_steps
        if position.step == 1 or position.step % self.settings.log_every == 0 or done:
            self._log(trainer, module)
        if done:
            trainer.should_stop = True
        elif position.batch < self.batches:
            if self._asked_to_stop(trainer):
                self.save(trainer, module)
                raise Interrupted
            if self._due(position.step):
                before = time.monotonic()
                self.save(trainer, module)
                self._began += time.monotonic() - before
        self._step_ended = time.monotonic()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _share_device(_module(pl_module))
        _share_buffers(trainer, _module(pl_module))
        if trainer.state.fn == "fit":
            self.save(trainer, _module(pl_module))

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # The checkpoint was written when the evaluation began. Some processes may have one batch more than others.
        data_module: DataModule = trainer.datamodule  # type: ignore[attr-defined]
        if batch_idx < data_module.common_val_batches(trainer.world_size) and self._asked_to_stop(trainer):
            raise Interrupted

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = _module(pl_module)
        self.close_epoch(trainer, module, evaluated=trainer.check_val_every_n_epoch == 1 or self._at_interval(trainer))
        trainer.should_stop = self.ended(module)
        # After the last step only the final files are missing: they are written in any case.
        if not trainer.should_stop and self._asked_to_stop(trainer):
            raise Interrupted

    def ended(self, module: DetectorModule) -> bool:
        """Return whether no step follows: after the last one, or after too many evaluations without a higher AP."""
        patience = module.schedule.settings.early_stop
        stopped_early = patience is not None and self.stale >= patience
        return stopped_early or module.position.step >= module.schedule.total_steps

    def close_epoch(self, trainer: pl.Trainer, module: DetectorModule, *, evaluated: bool) -> None:
        """Write the metrics, the best weights, and a checkpoint at the start of the next epoch."""
        _require_equal(trainer, module)
        position = module.position
        if evaluated and trainer.is_global_zero:
            row = {"step": position.step, "epoch": position.epoch + 1, **module.metrics, "threshold": module.threshold}
            self.validation.add(row)
            if self.settings.keep_detections:
                write_text(self.folder / "detections" / f"{position.step}.json", json.dumps(module.detections))
            log_row(trainer.loggers, {k: v for k, v in module.metrics.items() if v == v}, position.step)
            score = module.metrics[main_metric(module.metrics)]
            self.stale += 1
            if score > self.best:
                self.best, self.stale = score, 0
                save_weights(self.folder / "best.safetensors", module.evaluated, self.meta(module))
        if module.schedule.settings.early_stop is not None:
            self.stale = trainer.strategy.broadcast(self.stale)  # only the first process has the metrics
        position.epoch, position.batch = position.epoch + 1, 0
        self.save(trainer, module)
        if trainer.is_global_zero and time.monotonic() - self._drawn > DRAW_SECONDS:
            draw_curves(self.train, self.validation, self.folder / "curves.png")
            self._drawn = time.monotonic()

    def _asked_to_stop(self, trainer: pl.Trainer) -> bool:
        """Return whether any process was asked to stop, so that all stop together."""
        return trainer.strategy.reduce_boolean_decision(self.stop.received, all=False)

    def _at_interval(self, trainer: pl.Trainer) -> bool:
        return (trainer.current_epoch + 1) % self.settings.validate_every == 0

    def _due(self, step: int) -> bool:
        if self.settings.checkpoint_steps is not None:
            return step % self.settings.checkpoint_steps == 0
        return time.monotonic() - self._saved >= 60 * self.settings.checkpoint_minutes

    def _log(self, trainer: pl.Trainer, module: DetectorModule) -> None:
        now = time.monotonic()
        seconds = (now - self._began) / max(1, self._steps_since_row)
        self._began, self._steps_since_row = now, 0
        if trainer.is_global_zero:
            terms = {name: float(term) for name, term in module.terms.items()}
            row: dict[str, float] = {"loss": sum(terms.values()), **terms}
            row |= {"lr": module.schedule.rate(module.position.step - 1), "seconds": seconds}
            self.train.add({"step": module.position.step, "epoch": module.position.epoch + 1, **row})
            log_row(trainer.loggers, row, module.position.step)


def main_metric(metrics: dict[str, float]) -> str:
    """Return the metric that selects the best weights: AP of masks if there are any, otherwise of boxes."""
    return "masks/AP" if "masks/AP" in metrics else "boxes/AP"


def _module(module: pl.LightningModule) -> DetectorModule:
    if not isinstance(module, DetectorModule):
        raise TypeError(f"RunKeeper: expected a DetectorModule, got {type(module).__name__}")
    return module


def _share_device(module: DetectorModule) -> None:
    """Move the average of the weights to the device of the trained ones, to which Lightning has moved them."""
    if module.average is not None:
        module.average.detector.to(module.device)


def _share_buffers(trainer: pl.Trainer, module: DetectorModule) -> None:
    """Give all processes the buffers of the first, which are the saved ones.

    Batch norms that learn have seen other images in each process since the last exchange; a resumed evaluation, which
    starts from the saved ones, would have other results.
    """
    if trainer.world_size > 1:
        for buffer in module.detector.buffers():
            torch.distributed.broadcast(buffer, src=0)
        if module.average is not None:
            module.average.copy_buffers(module.detector)


def _require_equal(trainer: pl.Trainer, module: DetectorModule) -> None:
    """Raise unless all processes have the same weights: only those of the first one are saved."""
    if trainer.world_size > 1:
        sums = torch.stack([parameter.detach().double().sum() for parameter in module.detector.parameters()])
        all_sums: Tensor = module.all_gather(sums)  # type: ignore[assignment]
        if not torch.equal(all_sums, all_sums[:1].expand_as(all_sums)):
            raise RuntimeError("the weights of the processes differ; were all started with the same settings?")
