"""A detector as a Lightning module: training steps and evaluation."""

from __future__ import annotations

import math
import random

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from bucketrank.detectors import Detector
from bucketrank.errors import NonFiniteLossError
from bucketrank.evaluation import Evaluator
from bucketrank.evaluation.evaluator import Record
from bucketrank.training.data_module import Position, seed_of
from bucketrank.training.schedule import Schedule, build_optimiser, set_rate
from bucketrank.training.train_step import Batch, sum_terms
from bucketrank.training.weight_average import WeightAverage


class DetectorModule(pl.LightningModule):
    """A detector with its schedule; ``metrics`` and ``threshold`` are those of the last evaluation.

    ``average`` is the moving average of its weights, if the schedule asks for one.

    The random numbers of a step depend on seed, epoch, batch and process, not on earlier draws: a resumed run draws the
    same ones.
    """

    def __init__(
        self,
        detector: Detector,
        *,
        schedule: Schedule,
        position: Position,
        evaluator: Evaluator,
        seed: int,
        keep_detections: bool = False,
    ) -> None:
        super().__init__()
        self.detector = detector
        self.schedule = schedule
        self.position = position
        self.evaluator = evaluator
        self.seed = seed
        self._parts: list[dict[str, Tensor]] = []  # loss terms of the batches of the last step
        self.metrics: dict[str, float] = {}  # set on the first process only
        self.threshold = 0.0
        self.keep_detections = keep_detections
        self.detections: list[Record] = []  # of the last evaluation, if they are kept; first process only
        decay = schedule.settings.ema
        # No submodule: the average is neither trained nor wrapped for several devices.
        self.average = None if decay is None else WeightAverage(detector, decay)

    @property
    def evaluated(self) -> Detector:
        """The detector that is evaluated and saved: the average of the weights, or the trained detector."""
        return self.detector if self.average is None else self.average.detector

    @property
    def terms(self) -> dict[str, Tensor]:
        """The loss terms of the last step: their means over its batches."""
        names = self._parts[0] if self._parts else ()
        return {name: torch.stack([part[name] for part in self._parts]).mean() for name in names}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        mixed = str(self.trainer.precision).endswith("-mixed")
        return build_optimiser(self.detector, self.schedule.settings, mixed_precision=mixed)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        position = self.position
        seed = seed_of(self.seed, position.epoch, self.global_rank, position.batch)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (the generator that other libraries use)
        set_rate(self.trainer.optimizers[0], self.schedule.rate(position.step))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, terms = sum_terms(self.detector, batch)
        if self.position.batch % self.schedule.settings.accumulate == 0:
            self._parts = []
        self._parts.append({name: term.detach() for name, term in terms.items()})
        if not loss.isfinite():
            values = ", ".join(f"{name} {float(term):.4g}" for name, term in self._parts[-1].items())
            ids = ", ".join(str(int(target["image_id"])) for target in batch[1])
            raise NonFiniteLossError(
                f"step {self.position.step + 1}: the loss is not finite ({values}) on the images with ids {ids}; look "
                "at these images (bucketrank check-data), or lower schedule.lr, or set schedule.clip"
            )
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, targets = batch
        self.evaluator.add([int(target["image_id"]) for target in targets], self.evaluated(images))

    def on_validation_epoch_end(self) -> None:
        self.evaluator.gather()
        if self.trainer.is_global_zero:
            self.metrics = self.evaluator.metrics()
            if self.keep_detections:
                self.detections = self.evaluator.detections
            threshold = self.evaluator.best_threshold()
            self.threshold = 0.0 if math.isnan(threshold) else threshold  # NaN: there was no detection
        self.evaluator.reset()
