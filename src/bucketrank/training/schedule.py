"""The learning rate, a function of the step alone, and the optimiser."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bucketrank.settings.training import ScheduleSettings

CYCLE_START, CYCLE_END, CYCLE_RISE = 1 / 25, 1e-4, 0.25  # shares of the rate, and of the steps
MAX_WARMUP = 0.25  # share of all steps


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step. It depends on the step alone, so a resumed run has nothing to restore.

    >>> settings = ScheduleSettings(lr=0.01, warmup_steps=2, warmup_factor=0.5, milestones=(2,), epochs=3)
    >>> schedule = Schedule(settings, batch_size=8, steps_per_epoch=4)  # half of 16 images: half of the rate
    >>> [round(schedule.rate(step), 5) for step in range(0, 12)]
    [0.0025, 0.00375, 0.005, 0.005, 0.005, 0.005, 0.005, 0.005, 0.0005, 0.0005, 0.0005, 0.0005]
    """

    settings: ScheduleSettings
    batch_size: int
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        total = self.settings.epochs * self.steps_per_epoch
        return total if self.settings.max_steps is None else min(total, self.settings.max_steps)

    @property
    def scaled(self) -> float:
        """The learning rate scaled to this batch size; ``lr`` is meant for ``base_batch`` images."""
        part = self.batch_size / self.settings.base_batch
        return self.settings.lr * {"linear": part, "sqrt": math.sqrt(part), "none": 1.0}[self.settings.scaling]

    @property
    def warmup_steps(self) -> int:
        """The steps that are set, at most a quarter of the run."""
        return min(self.settings.warmup_steps, int(MAX_WARMUP * self.total_steps))

    def rate(self, step: int) -> float:
        """Return the learning rate of step 0, 1, ..."""
        return self.scaled * (self._cycle(step) if self.settings.policy == "one_cycle" else self._steps(step))

    def _steps(self, step: int) -> float:
        passed = sum(step >= epoch * self.steps_per_epoch for epoch in self.settings.milestones)
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
    """Build the optimiser of all trained parameters, in groups by their factor on the rate (``group["factor"]``)."""
    groups: dict[float, list[nn.Parameter]] = {}
    backbone = getattr(model, "backbone_prefix", "backbone.")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(_factor(name, settings, backbone=backbone), []).append(parameter)
    parameters = [{"params": group, "factor": factor} for factor, group in groups.items()]
    if settings.optimiser == "adamw":
        # On a CPU, the fused step avoids a loop over parameters in Python. With mixed precision it would unscale the
        # gradients itself, which rules out gradient clipping.
        on_cpu = all(parameter.device.type == "cpu" for group in groups.values() for parameter in group)
        fused = on_cpu and not mixed_precision
        return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=fused or None)
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def restore_optimiser(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a checkpointed state, and lay every state tensor out in memory like its parameter.

    Files hold contiguous tensors. The fused AdamW step walks a parameter and its moments in memory order, so the
    moments of a channels-last parameter must be channels-last, too.
    """
    optimiser.load_state_dict(state)
    for parameter, values in optimiser.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def require_known_factors(model: nn.Module, settings: ScheduleSettings) -> None:
    """Raise ValueError if a key of ``schedule.factors`` is in the name of no parameter, such as a misspelt one."""
    names = [name for name, _ in model.named_parameters()]
    for key in settings.factors:
        if not any(key in name for name in names):
            raise ValueError(
                f"schedule.factors: expected a part of the name of a parameter, such as {names[0]}, got {key!r}"
            )


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group to its factor times ``rate``."""
    for group in optimiser.param_groups:
        group["lr"] = rate * group["factor"]


def _factor(name: str, settings: ScheduleSettings, *, backbone: str) -> float:
    for part, factor in settings.factors.items():
        if part in name:
            return factor
    return settings.backbone_factor if name.startswith(backbone) else 1.0


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
