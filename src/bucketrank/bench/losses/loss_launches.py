"""Launches and host waits of one step of a contender, where they can be counted."""

from __future__ import annotations

from typing import NamedTuple

from bucketrank.bench.losses.loss_contenders import loss_step
from bucketrank.bench.losses.loss_modes import Mode
from bucketrank.bench.losses.synthetic_logits import SyntheticLogits
from bucketrank.launches import count_launches

LAUNCHES_RULE = (
    "torch operations other than views and allocations, and Triton kernels, in one step; host waits are operations"
    " whose result the host has to read. Replaying a CUDA graph is one launch. Compiled code and the fused CPU kernel"
    " are not counted. The tables leave out those of the CPU, where the losses run other operations than on a GPU"
)


class StepLaunches(NamedTuple):
    """Launches of a step, and waits of the host for the device; None if they cannot be counted."""

    launches: int | None = None
    waits: int | None = None


def is_counted(name: str, mode: Mode) -> bool:
    """Return whether the launches of a contender are counted by running a step."""
    return mode == "eager" and name != "exact-fused"


def step_launches(name: str, loss: str | None, data: SyntheticLogits, mode: Mode) -> StepLaunches:
    """Run a step of the contender and count; a captured step is one launch without a wait."""
    if mode == "graph":
        return StepLaunches(1, 0)
    if not is_counted(name, mode):
        return StepLaunches()
    step = loss_step(name, loss, data)
    with count_launches() as counted:
        step()
    return StepLaunches(counted.launches, counted.waits)
