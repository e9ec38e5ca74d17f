"""The training loop: steps, evaluation, checkpoints and stopping, on Lightning Fabric.

Fabric moves tensors to the device, applies mixed precision and DDP, and connects the processes. All processes run this
loop; the first one writes the files.
"""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from bucketrank.detectors import Detector
from bucketrank.errors import NonFiniteLossError
from bucketrank.evaluation import Evaluator
from bucketrank.settings import Recipe
from bucketrank.training.batches import RunData, seed_of
from bucketrank.training.checkpoints import Checkpoints, Progress
from bucketrank.training.fabric import any_process, broadcast_buffers, require_equal_weights
from bucketrank.training.log import RunLog
from bucketrank.training.optimiser import (
    EMA,
    Batch,
    Schedule,
    SummedTerms,
    build_optimiser,
    restore_optimiser,
    set_rate,
    sum_terms,
)
from bucketrank.training.processes import Interrupted, StopSignals
from bucketrank.weights.atomic import write_text
from bucketrank.weights.files import Meta, save_weights
from bucketrank.weights.load import without_weights

FIRST_PLAN = 10  # steps after which a run with a time budget first estimates how many fit
VERSIONED = ("bucketrank", "torch", "torchvision", "timm", "transformers")  # packages named in weights files


class Loop:
    """Train a detector epoch by epoch until its last step, early stopping or a stop signal.

    All random numbers of a batch depend only on seed, epoch, batch and process, so a resumed run draws the same ones.
    """

    def __init__(
        self,
        fabric: Fabric,
        detector: Detector,
        *,
        recipe: Recipe,
        data: RunData,
        schedule: Schedule,
        evaluator: Evaluator,
        progress: Progress,
        folder: Path,
        log: RunLog,
        stop: StopSignals,
    ) -> None:
        self.fabric, self.recipe, self.settings = fabric, recipe, recipe.trainer
        self.data, self.schedule, self.evaluator = data, schedule, evaluator
        self.progress, self.folder, self.log, self.stop = progress, folder, log, stop
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.batches = len(data.batches(world_size=fabric.world_size))  # per epoch and process
        self.detector = detector.to(fabric.device)
        mixed = self.settings.precision.endswith("-mixed")
        optimiser = build_optimiser(self.detector, recipe.schedule, mixed_precision=mixed)
        self.model, self.optimiser = fabric.setup(DetectorLoss(self.detector), optimiser)
        self.ema = None if recipe.schedule.ema is None else EMA(self.detector, recipe.schedule.ema)
        self._terms: list[dict[str, Tensor]] = []  # loss terms of the current step's micro-batches
        self._saved = self._counted = time.monotonic()

    def run(self) -> None:
        """Run the remaining epochs."""
        self.log.start(self.progress)
        status = "failed"
        try:
            while not self.finished:
                self.train_epoch()
                with self.log.paused():
                    evaluated = self.is_evaluated
                    if evaluated:
                        self.evaluate()
                    self.close_epoch(evaluated=evaluated)
                if not self.finished:  # otherwise the final files are written, even after a signal
                    self.stop_if_asked()
            status = "success"
        finally:
            self.log.stop(status)

    @property
    def finished(self) -> bool:
        """Whether the last epoch is closed."""
        return self.progress.is_finished(self.schedule)

    @property
    def epoch_is_trained(self) -> bool:
        """Whether all steps of this epoch are done; a run may be resumed between the steps and the evaluation."""
        progress = self.progress
        return progress.batch >= self.batches or progress.step >= self.schedule.total_steps or progress.out_of_time

    @property
    def is_evaluated(self) -> bool:
        """Whether this epoch is evaluated; the last one always is."""
        epoch = self.progress.epoch + 1
        last = epoch >= self.schedule.total_epochs or self.progress.out_of_time
        return last or epoch % self.settings.validate_every == 0

    @property
    def evaluated_detector(self) -> Detector:
        """The detector that is evaluated and saved: the EMA if there is one, otherwise the trained detector."""
        return self.detector if self.ema is None else self.ema.detector

    def train_epoch(self) -> None:
        """Train on the remaining batches of this epoch, in steps of ``schedule.accumulate`` micro-batches."""
        if self.epoch_is_trained:
            return
        progress, accumulate, clip = self.progress, self.recipe.schedule.accumulate, self.recipe.schedule.clip
        self.model.train()
        for batch in self._train_batches():
            self._seed()
            set_rate(self.optimiser, self.schedule.rate(progress.step))
            completes_step = (progress.batch + 1) % accumulate == 0 or progress.batch + 1 == self.batches
            with self.fabric.no_backward_sync(self.model, enabled=not completes_step):
                loss = self.compute_loss(batch)
                self.fabric.backward(loss / min(accumulate, self.batches - progress.batch // accumulate * accumulate))
            progress.batch += 1
            if not completes_step:
                continue
            if clip is not None:  # the gradient scaler of 16-mixed skips steps with infinite gradients
                norm = self.fabric.clip_gradients(self.model, self.optimiser, max_norm=clip, error_if_nonfinite=False)
                if norm is not None and self.settings.precision != "16-mixed" and not norm.isfinite():
                    text = f"step {progress.step + 1}: the gradient is not finite"
                    raise NonFiniteLossError(f"{text}; {self._remedies()}")
            self.optimiser.step()
            self.optimiser.zero_grad()
            progress.step += 1
            if self.ema is not None:
                self.ema.update(self.detector)
            self.log.step(progress, self._mean_terms())
            if self.settings.max_time is not None:
                self.follow_clock()
            if self.epoch_is_trained:
                return
            self.stop_if_asked(save=True)
            if self._checkpoint_is_due():
                with self.log.paused():
                    self.save()

    def compute_loss(self, batch: Batch) -> Tensor:
        """Run the forward pass; raise NonFiniteLossError with the image ids if the loss is infinite or NaN."""
        loss, terms = self.model(HiddenBatch(batch))
        self._terms.append({name: term.detach() for name, term in terms.items()})
        if not loss.isfinite():
            values = ", ".join(f"{name} {float(term):.4g}" for name, term in self._terms[-1].items())
            ids = ", ".join(str(int(target["image_id"])) for target in batch[1])
            raise NonFiniteLossError(
                f"step {self.progress.step + 1}: the loss is not finite ({values}) on the images with ids {ids}; look "
                f"at these images (bucketrank check-data), or {self._remedies()}"
            )
        return loss  # type: ignore[no-any-return]

    def _remedies(self) -> str:
        """Say what helps against numbers that are not finite."""
        mixed = ", or leave out trainer.precision" if self.settings.precision != "32-true" else ""
        return f"lower schedule.lr, or set schedule.clip{mixed}"

    def evaluate(self) -> None:
        """Evaluate on this process's share of the validation images, and gather the detections in the first process."""
        broadcast_buffers(self.fabric, self.detector)
        if self.ema is not None:
            self.ema.copy_buffers(self.detector)
        self.save()
        self.log.evaluating()
        self.evaluated_detector.eval()
        common = self.data.min_val_batches(self.fabric.world_size)
        for number, batch in enumerate(self._val_batches()):
            self.evaluate_batch(batch)
            if number < common:
                self.stop_if_asked()
        self.evaluator.gather()
        if self.fabric.is_global_zero:
            self.progress.metrics = self.evaluator.metrics()
            threshold = self.evaluator.best_threshold()
            self.progress.threshold = 0.0 if math.isnan(threshold) else threshold  # NaN without detections
            if self.settings.keep_detections:
                path = self.folder / "detections" / f"{self.progress.step}.json"
                write_text(path, json.dumps(self.evaluator.detections))
        self.evaluator.reset()

    @torch.inference_mode()
    def evaluate_batch(self, batch: Batch) -> None:
        """Add the detections on one batch to the evaluator."""
        images, targets = batch
        with self.fabric.autocast():
            detections = self.evaluated_detector(images)
        self.evaluator.add([int(target["image_id"]) for target in targets], detections)

    def close_epoch(self, *, evaluated: bool) -> None:
        """Report the epoch, keep the best weights, and write a checkpoint at the start of the next epoch."""
        require_equal_weights(self.fabric, self.detector)
        progress = self.progress
        self.log.epoch(progress, evaluated=evaluated)
        if evaluated and self.fabric.is_global_zero:
            score = progress.metrics[main_metric(progress.metrics)]
            progress.stale += 1
            if score > progress.best:
                progress.best, progress.stale = score, 0
                save_weights(self.folder / "best.safetensors", self.evaluated_detector, self.meta())
        if self.recipe.schedule.early_stop is not None:
            progress.stale = self.fabric.broadcast(progress.stale)  # only the first process has the metrics
        progress.epoch, progress.batch = progress.epoch + 1, 0
        self._count_time()
        if not self.finished:
            self.plan()
        self.save()

    def stop_if_asked(self, *, save: bool = False) -> None:
        """Raise Interrupted in all processes if any of them received a stop signal."""
        if any_process(self.fabric, flag=self.stop.received):
            if save:
                self.save()
            raise Interrupted

    def follow_clock(self) -> None:
        """End the run in all processes once ``trainer.max_time`` is used up; plan the steps of the first epoch."""
        progress, limit = self.progress, self.settings.max_seconds
        self._count_time()
        progress.out_of_time = any_process(self.fabric, flag=limit is not None and progress.seconds >= limit)
        if progress.epoch == 0 and progress.step in (FIRST_PLAN << doubled for doubled in range(32)):
            self.plan()

    def plan(self) -> None:
        """Estimate how many steps fit into ``trainer.max_time``, with their evaluations; the schedule follows."""
        limit = self.settings.max_seconds
        if limit is not None:
            self.progress.planned = self.fabric.broadcast(fitting_steps(self.progress, limit))
            self.schedule.planned_steps = self.progress.planned

    def _count_time(self) -> None:
        now = time.monotonic()
        self.progress.seconds += now - self._counted
        self._counted = now

    def save(self) -> None:
        """Write a checkpoint in the first process; the state of the others is the same."""
        if self.fabric.is_global_zero:
            self.checkpoints.save(
                {
                    **asdict(self.progress),
                    "batches": self.batches,
                    "recipe": self.recipe.to_dict(),
                    "model": self.detector.state_dict(),
                    "optimiser": self.optimiser.state_dict(),
                    "precision": self.fabric.strategy.precision.state_dict(),
                    "average": None if self.ema is None else self.ema.state(),
                }
            )
        self._saved = time.monotonic()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the tensors of a checkpoint; its numbers are the ``progress`` of this loop."""
        self.detector.load_state_dict(state["model"])
        restore_optimiser(self.optimiser.optimizer, state["optimiser"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        if self.ema is not None:
            self.ema.restore(state["average"])

    def meta(self) -> Meta:
        """Build the metadata of weights files."""
        return Meta(
            classes=self.data.classes,
            category_ids=self.data.train.category_ids,
            threshold=self.progress.threshold,
            recipe=without_weights(self.recipe).to_dict(),
            metrics=self.progress.metrics,
            versions={name: version(name) for name in VERSIONED},
            images={"train": len(self.data.train), "val": len(self.data.val)},
        )

    def _train_batches(self) -> Any:
        loader = self.data.train_loader(
            epoch=self.progress.epoch,
            start=self.progress.batch,
            last_epochs=self.schedule.total_epochs - self.progress.epoch <= self.recipe.data.close_augmentations,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
            pin_memory=self.fabric.device.type == "cuda",
        )
        return self.fabric.setup_dataloaders(loader, use_distributed_sampler=False)

    def _val_batches(self) -> Any:
        loader = self.data.val_loader(rank=self.fabric.global_rank, world_size=self.fabric.world_size)
        return self.fabric.setup_dataloaders(loader, use_distributed_sampler=False)

    def _seed(self) -> None:
        place = (self.progress.epoch, self.fabric.global_rank, self.progress.batch)
        seed = seed_of(self.settings.seed, *place)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (the generator that other libraries use)

    def _mean_terms(self) -> dict[str, float]:
        """Return the mean loss terms over the micro-batches of a step, and start the next step."""
        values = torch.stack([torch.stack(list(terms.values())) for terms in self._terms]).mean(dim=0)
        names = list(self._terms[0])
        self._terms = []
        return dict(zip(names, values.tolist(), strict=True))

    def _checkpoint_is_due(self) -> bool:
        if self.settings.checkpoint_steps is not None:
            return self.progress.step % self.settings.checkpoint_steps == 0
        return time.monotonic() - self._saved >= 60 * self.settings.checkpoint_minutes


class DetectorLoss(nn.Module):
    """The forward pass of a training step, as the module that Fabric wraps for precision and DDP."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, hidden: HiddenBatch) -> SummedTerms:
        """Return the loss and its terms."""
        device = hidden.batch[0][0].device.type
        # Fabric's autocast caches half-precision weights. A head shared by several feature maps would then sum its
        # gradients in half precision.
        with torch.autocast(device, enabled=torch.is_autocast_enabled(device), cache_enabled=False):
            return sum_terms(self.detector, hidden.batch)


class HiddenBatch:
    """A batch whose tensors Fabric does not see.

    In mixed precision Fabric converts all input tensors to half precision, which would round ground-truth boxes to
    several pixels. Autocast still runs the layers in half precision.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch


def fitting_steps(progress: Progress, limit: float) -> int:
    """Estimate how many steps, from the first on, fit into a time budget; at least one more than are done.

    >>> fitting_steps(Progress(step=10, seconds=20.0), limit=3600.0)
    1800
    """
    return max(progress.step + 1, round(progress.step * limit / progress.seconds))


def main_metric(metrics: dict[str, float]) -> str:
    """Return the metric that selects the best weights: mask AP if there are masks, otherwise box AP."""
    return "masks/AP" if "masks/AP" in metrics else "boxes/AP"
