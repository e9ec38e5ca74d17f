"""A detector as a module of Lightning: one step of training, and evaluation."""

from __future__ import annotations

import random

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from bucketrank.detectors import Detector
from bucketrank.evaluation import Evaluator
from bucketrank.training.data import Position, seed_of
from bucketrank.training.schedule import Schedule, build_optimiser, set_rate

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


class NonFiniteLossError(RuntimeError):
    """The loss became infinite or NaN; the message names the images of the batch."""


class DetectorModule(pl.LightningModule):
    """Trains ``detector`` by ``schedule``; after each evaluation ``metrics`` and ``threshold`` are those of it.

    Whatever is drawn by chance in a step follows from seed, epoch, batch and process, not from what was drawn before:
    a run that goes on from a checkpoint draws the same.
    """

    def __init__(
        self, detector: Detector, *, schedule: Schedule, position: Position, evaluator: Evaluator, seed: int
    ) -> None:
        super().__init__()
        self.detector = detector
        self.schedule = schedule
        self.position = position
        self.evaluator = evaluator
        self.seed = seed
        self.terms: dict[str, Tensor] = {}  # of the last step
        self.metrics: dict[str, float] = {}  # of the last evaluation, on the first process
        self.threshold = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimiser(self.detector, self.schedule.settings)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        position = self.position
        seed = seed_of(self.seed, position.epoch, self.global_rank, position.batch)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (what others' code draws from)
        set_rate(self.trainer.optimizers[0], self.schedule.rate(position.step))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, targets = batch
        terms: dict[str, Tensor] = self.detector(images, targets)
        loss = torch.stack(list(terms.values())).sum()
        self.terms = {name: term.detach() for name, term in terms.items()}
        if not loss.isfinite():
            values = ", ".join(f"{name} {float(term):.4g}" for name, term in self.terms.items())
            ids = ", ".join(str(int(target["image_id"])) for target in targets)
            raise NonFiniteLossError(
                f"step {self.position.step + 1}: the loss is not finite ({values}) on the images with ids {ids}; look "
                "at these images (bucketrank check-data), or lower schedule.lr, or set schedule.clip"
            )
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, targets = batch
        self.evaluator.add([int(target["image_id"]) for target in targets], self.detector(images))

    def on_validation_epoch_end(self) -> None:
        self.evaluator.gather()
        if self.trainer.is_global_zero:
            self.metrics = self.evaluator.metrics()
            chosen = self.evaluator.best_threshold()
            self.threshold = chosen if chosen == chosen else 0.0  # NaN: nothing was found
        self.evaluator.reset()
