"""Clocks for the devices of torch: wall time on the CPU, events on CUDA, ROCm and XPU.

Together with ``device_memory.py`` and ``graph_replay.py`` the only code of the benchmarks that differs between devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch

# Devices whose module in torch has events and an allocator with statistics. ROCm devices are called "cuda", too.
EVENT_DEVICES = ("cuda", "xpu")

Stop = Callable[[], float]  # ends a measurement and returns its seconds


class DeviceClock(Protocol):
    """A clock that measures the work of a device."""

    def start(self) -> Stop:
        """Wait until the device is idle, and start a measurement."""

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class WallClock:
    """Seconds of the host, until the device has finished; for devices without events."""

    now: Callable[[], float] = time.perf_counter
    synchronize: Callable[[], None] = _nothing

    def start(self) -> Stop:
        """Wait until the device is idle, and read the clock."""
        self.synchronize()
        begin = self.now()

        def stop() -> float:
            self.synchronize()
            return self.now() - begin

        return stop


@dataclass(frozen=True)
class EventClock:
    """Seconds between two events on the current stream of a device; ``module`` is ``torch.cuda`` or ``torch.xpu``.

    The device is idle when a measurement starts, so the time includes the host's launches where these take longer than
    the work, but neither the start nor the end of the measurement itself.
    """

    module: ModuleType | Any

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        self.module.synchronize()

    def start(self) -> Stop:
        """Wait until the device is idle, and record an event."""
        begin, end = self.module.Event(enable_timing=True), self.module.Event(enable_timing=True)
        self.module.synchronize()
        begin.record()

        def stop() -> float:
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000  # milliseconds

        return stop


def device_clock(device: str) -> DeviceClock:
    """Return the clock for a device; CUDA and XPU devices must be current, see :func:`current_device`."""
    name = torch.device(device).type
    if name in EVENT_DEVICES:
        return EventClock(getattr(torch, name))
    if name == "cpu":
        return WallClock()
    return WallClock(synchronize=getattr(torch, name).synchronize)  # for example torch.mps


def current_device(device: str) -> AbstractContextManager[Any]:
    """Return a context in which ``device`` is the current one: events, graphs and statistics belong to that one."""
    chosen = torch.device(device)
    if chosen.type not in EVENT_DEVICES:
        return nullcontext()
    context: AbstractContextManager[Any] = getattr(torch, chosen.type).device(chosen)
    return context


def seconds_of(call: Callable[[], object], clock: DeviceClock) -> float:
    """Return the seconds of a single call."""
    stop = clock.start()
    call()
    return stop()
