"""One optimiser step and its parts: learning-rate schedule, optimiser, loss terms and EMA."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from bucketrank.detectors import Detector
from bucketrank.settings.training import ScheduleSettings

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]  # images and targets

CYCLE_START, CYCLE_END, CYCLE_RISE = 1 / 25, 1e-4, 0.25  # fractions of the rate, and of the steps
MAX_WARMUP = 0.25  # fraction of all steps


@dataclass
class Schedule:
    """The learning rate of each step. It depends only on the step, so a resumed run has nothing to restore.

    ``planned_steps`` is the length of a run with a time budget. The milestones scale with it.

    >>> settings = ScheduleSettings(lr=0.01, warmup_steps=2, warmup_factor=0.5, milestones=(2,), epochs=3)
    >>> schedule = Schedule(settings, batch_size=8, steps_per_epoch=4)  # 8 of 16 images: half the rate
    >>> [round(schedule.rate(step), 5) for step in range(0, 12)]
    [0.0025, 0.00375, 0.005, 0.005, 0.005, 0.005, 0.005, 0.005, 0.0005, 0.0005, 0.0005, 0.0005]
    """

    settings: ScheduleSettings
    batch_size: int
    steps_per_epoch: int
    planned_steps: int | None = None

    @property
    def total_steps(self) -> int:
        """Number of steps in the whole run."""
        total = self.planned_steps or self.settings.epochs * self.steps_per_epoch
        return total if self.settings.max_steps is None else min(total, self.settings.max_steps)

    @property
    def total_epochs(self) -> int:
        """Number of epochs in the whole run, the last of which may be incomplete."""
        return math.ceil(self.total_steps / self.steps_per_epoch)

    @property
    def scaled(self) -> float:
        """The learning rate scaled to this batch size; ``lr`` is meant for ``base_batch`` images."""
        part = self.batch_size / self.settings.base_batch
        return self.settings.lr * {"linear": part, "sqrt": math.sqrt(part), "none": 1.0}[self.settings.scaling]

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up steps, at most a quarter of the run."""
        return min(self.settings.warmup_steps, int(MAX_WARMUP * self.total_steps))

    def rate(self, step: int) -> float:
        """Return the learning rate of step 0, 1, ..."""
        return self.scaled * (self._cycle(step) if self.settings.policy == "one_cycle" else self._steps(step))

    def _steps(self, step: int) -> float:
        epochs = self.settings.epochs
        length = self.planned_steps or epochs * self.steps_per_epoch
        passed = sum(step * epochs >= epoch * length for epoch in self.settings.milestones)
        factor = self.settings.gamma**passed
        if step < self.warmup_steps:
            factor *= 1 - (1 - step / self.warmup_steps) * (1 - self.settings.warmup_factor)
        return float(factor)

    def _cycle(self, step: int) -> float:
        rise = max(1, int(CYCLE_RISE * self.total_steps))
        if step < rise:
            return _cosine(CYCLE_START, 1.0, step / rise)
        return _cosine(1.0, CYCLE_END, (step - rise) / max(1, self.total_steps - rise))


def build_optimiser(
    model: nn.Module, settings: ScheduleSettings, *, mixed_precision: bool = False
) -> torch.optim.Optimizer:
    """Build the optimiser for all trainable parameters, grouped by learning-rate factor (``group["factor"]``)."""
    groups: dict[float, list[nn.Parameter]] = {}
    backbone = getattr(model, "backbone_prefix", "backbone.")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(_factor(name, settings, backbone=backbone), []).append(parameter)
    parameters = [{"params": group, "factor": factor} for factor, group in groups.items()]
    if settings.optimiser == "adamw":
        # The fused CPU step avoids a Python loop over the parameters. In mixed precision it would unscale the gradients
        # itself, after clipping.
        on_cpu = all(parameter.device.type == "cpu" for group in groups.values() for parameter in group)
        fused = on_cpu and not mixed_precision
        return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=fused or None)
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def restore_optimiser(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a checkpointed state, and give each state tensor the memory layout of its parameter.

    Files hold contiguous tensors. The fused AdamW step walks a parameter and its moments in memory order, so the
    moments of a channels-last parameter must be channels-last, too.
    """
    optimiser.load_state_dict(state)
    for parameter, values in optimiser.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def require_known_factors(model: nn.Module, settings: ScheduleSettings) -> None:
    """Raise ValueError if a key of ``schedule.factors`` matches no parameter name."""
    names = [name for name, _ in model.named_parameters()]
    for key in settings.factors:
        if not any(key in name for name in names):
            raise ValueError(f"schedule.factors: expected a part of a parameter name, such as {names[0]}, got {key!r}")


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of each group to ``rate`` times its factor."""
    for group in optimiser.param_groups:
        group["lr"] = rate * group["factor"]


def _factor(name: str, settings: ScheduleSettings, *, backbone: str) -> float:
    for part, factor in settings.factors.items():
        if part in name:
            return factor
    return settings.backbone_factor if name.startswith(backbone) else 1.0


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


class SummedTerms(NamedTuple):
    """The loss terms of a batch by name, and their sum, which is minimised."""

    total: Tensor
    terms: dict[str, Tensor]


def sum_terms(model: nn.Module, batch: Batch) -> SummedTerms:
    """Run the forward pass of a detector in training mode."""
    terms: dict[str, Tensor] = model(*batch)
    return SummedTerms(torch.stack(list(terms.values())).sum(), terms)


def train_step(
    model: nn.Module, batch: Batch, optimiser: torch.optim.Optimizer, *, clip: float | None = None
) -> SummedTerms:
    """Train on one batch without Fabric: forward, backward, clip the gradient norm to ``clip``, step."""
    optimiser.zero_grad()
    summed = sum_terms(model, batch)
    summed.total.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimiser.step()
    return summed


class EMA:
    """An exponential moving average (EMA) of a detector's parameters; buffers are copied.

    After update t, the average is ``d * average + (1 - d) * weights`` with ``d = min(decay, (1 + t) / (10 + t))``. The
    ramp lets a short run forget its random initial weights.
    """

    def __init__(self, detector: Detector, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.detector = copy.deepcopy(detector).eval()

    @torch.no_grad()
    def update(self, detector: Detector) -> None:
        """Move the average towards the weights of ``detector``."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        get_ema_multi_avg_fn(decay)(list(self.detector.parameters()), list(detector.parameters()), self.updates)
        self.copy_buffers(detector)
        self.updates += 1

    @torch.no_grad()
    def copy_buffers(self, detector: Detector) -> None:
        """Copy the buffers of ``detector``, such as batch-norm statistics."""
        for own, current in zip(self.detector.buffers(), detector.buffers(), strict=True):
            own.copy_(current)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"updates": self.updates, "model": self.detector.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.updates = state["updates"]
        self.detector.load_state_dict(state["model"])
