"""Costs of one step besides time: launches and host waits, of the whole step and of its losses, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from bucketrank.bench.detectors.detector_results import StepCosts
from bucketrank.bench.detectors.loss_share import split_losses
from bucketrank.bench.device_memory import has_allocator_statistics, peak_allocated
from bucketrank.launches import count_launches

COST_RULES = {
    "launches": "torch operations other than views and allocations, and Triton kernels, in one step, and in the forward"
    " and backward pass of its criteria; host waits are operations whose result the host has to read. Fused CPU"
    " kernels are not counted",
    "memory": "growth of the memory in torch's allocator during one step, on CUDA, ROCm and XPU; includes the"
    " gradients, not the weights and the state of the optimiser",
}


class LaunchMeter:
    """A meter that adds up the launches and the waits inside :meth:`running`."""

    def __init__(self) -> None:
        self.launches = 0
        self.waits = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        with count_launches() as counted:
            yield
        self.launches += counted.launches
        self.waits += counted.waits


def cost_steps(device: str) -> int:
    """Return the number of steps that :func:`step_costs` runs on the device."""
    return 3 if has_allocator_statistics(device) else 2


def step_costs(model: nn.Module, step: Callable[[], object], zero_grad: Callable[[], object], device: str) -> StepCosts:
    """Run a few steps of ``model`` and count; ``zero_grad`` frees its gradients."""
    whole, losses = LaunchMeter(), LaunchMeter()
    with whole.running():
        step()
    # Not inside the count of the whole step: a split step has some operations more.
    with split_losses(model, losses):
        step()
    extra_bytes = None
    if has_allocator_statistics(device):
        zero_grad()
        extra_bytes = peak_allocated(step, device)
    return StepCosts(whole.launches, whole.waits, losses.launches, losses.waits, extra_bytes)
