"""Clocks, peak memory and CUDA graphs of torch devices, and interleaved timing of alternatives.

All device-specific benchmark code is here. Alternatives take turns, so a disturbance slows all of them and their ratios
stay meaningful.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeVar

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
    """Wall-clock seconds until the device has finished; for devices without events."""

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
    the work, but neither the start nor the end of the measurement itself. ``prepare`` runs before the first event.
    """

    module: ModuleType | Any
    prepare: Callable[[], object] = _nothing

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        self.module.synchronize()

    def start(self) -> Stop:
        """Wait until the device is idle, and record an event."""
        self.prepare()
        begin, end = self.module.Event(enable_timing=True), self.module.Event(enable_timing=True)
        self.module.synchronize()
        begin.record()

        def stop() -> float:
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000  # milliseconds

        return stop


def device_clock(device: str, *, clear_cache: bool = False) -> DeviceClock:
    """Return the clock for a device; CUDA and XPU devices must be current, see :func:`current_device`.

    With ``clear_cache``, CUDA devices start each measurement with an L2 cache that holds nothing of earlier calls.
    """
    name = torch.device(device).type
    if name == "cuda" and clear_cache:
        return EventClock(torch.cuda, cache_buffer(device).zero_)
    if name in EVENT_DEVICES:
        return EventClock(getattr(torch, name))
    if name == "cpu":
        return WallClock()
    return WallClock(synchronize=getattr(torch, name).synchronize)  # torch.mps, for instance


# At least this many bytes replace the cache: the last-level cache of large AMD GPUs, which is not their L2.
MIN_CACHE_BYTES = 256 << 20


def cache_buffer(device: str) -> torch.Tensor:
    """Allocate a buffer twice as large as the L2 cache of a CUDA device; writing all of it clears the cache."""
    size = max(2 * torch.cuda.get_device_properties(device).L2_cache_size, MIN_CACHE_BYTES)
    return torch.empty(size, dtype=torch.int8, device=device)


def current_device(device: str) -> AbstractContextManager[Any]:
    """Make ``device`` current within a context: events, graphs and statistics refer to the current device."""
    chosen = torch.device(device)
    if chosen.type not in EVENT_DEVICES:
        return nullcontext()
    context: AbstractContextManager[Any] = getattr(torch, chosen.type).device(chosen)
    return context


def seconds_of(call: Callable[[], object], clock: DeviceClock) -> float:
    """Time a single call."""
    stop = clock.start()
    call()
    return stop()


WALL_CLOCK = WallClock()


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Spread:
    """The median, the first quartile ``low`` and the third quartile ``high``."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute the spread of at least two values.

        >>> Spread.of([1.0, 2.0, 3.0, 4.0, 100.0])
        Spread(median=3.0, low=2.0, high=4.0)
        """
        if len(values) < 2:
            raise ValueError(f"Spread.of: expected at least 2 values, got {len(values)}")
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class TimedCall:
    """One alternative: the function to ``call``, timed in every ``every``-th round.

    If each ``every`` is a power of two, the faster alternatives take part in every round of a slower one. ``warmup``
    calls run before the first round. ``untimed`` calls run right before each timed one, so that the caches hold the
    data of this alternative and not of the previous one.
    """

    call: Callable[[], object]
    every: int = 1
    warmup: int = 1
    untimed: int = 0


# Seconds by round, without the rounds in which the alternative did not run.
Samples = dict[int, float]


def interleave(
    timed: Mapping[str, TimedCall],
    *,
    rounds: int,
    rotate: bool = False,
    clock: DeviceClock = WALL_CLOCK,
    advance: Callable[[str, int], None] = _ignore,
) -> dict[str, Samples]:
    """Call the alternatives in turn, round after round, and return the seconds of each timed call.

    Every second round runs in reverse, so that no alternative always follows the same one. With ``rotate`` each pair of
    rounds also starts one alternative later: over twice as many rounds as alternatives, each is first twice.
    ``advance`` receives the name of the alternative that was called, and the number of calls.
    """
    for name, alternative in timed.items():
        for _ in range(alternative.warmup):
            alternative.call()
            advance(name, 1)
    clock.synchronize()
    samples: dict[str, Samples] = {name: {} for name in timed}
    collecting = gc.isenabled()
    gc.collect()
    # Garbage collection would be timed with the call in which it happens.
    gc.disable()
    try:
        for turn in range(rounds):
            order = [name for name, alternative in timed.items() if turn % alternative.every == 0]
            if rotate and order:
                first = turn // 2 % len(order)
                order = order[first:] + order[:first]
            for name in reversed(order) if turn % 2 else order:
                for _ in range(timed[name].untimed):
                    timed[name].call()
                samples[name][turn] = seconds_of(timed[name].call, clock)
                advance(name, timed[name].untimed + 1)
    finally:
        if collecting:
            gc.enable()
    return samples


def ratio(numerator: Samples, denominator: Samples) -> Spread:
    """Compute the spread of the per-round ratios, over the rounds in which both alternatives ran."""
    both = numerator.keys() & denominator.keys()
    return Spread.of([numerator[turn] / denominator[turn] for turn in sorted(both)])


def has_allocator_statistics(device: str) -> bool:
    """Return whether :func:`peak_allocated` works on the device."""
    return torch.device(device).type in EVENT_DEVICES


def peak_allocated(call: Callable[[], object], device: str) -> int:
    """Measure the peak number of bytes allocated during the call, beyond those allocated before it.

    Memory outside torch's allocator, such as that of libraries, does not count.
    """
    module = getattr(torch, torch.device(device).type)
    module.synchronize()
    module.reset_peak_memory_stats()
    before: int = module.memory_allocated()
    call()
    module.synchronize()
    return int(module.max_memory_allocated()) - before


OutputT = TypeVar("OutputT")

GRAPH_DEVICES = ("cuda",)  # also ROCm
# Warm-up calls before the capture compile kernels and make one-time copies, which a capture cannot do.
WARM_UP = 3


def capture(step: Callable[[], OutputT]) -> Callable[[], OutputT]:
    """Capture ``step`` on the current CUDA device, and return a function that replays it.

    Every replay writes to the memory of the captured output, which is returned. The warm-up runs on the stream of the
    capture, so that autograd accumulates the gradients there.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = step()

    def replay() -> OutputT:
        graph.replay()
        return output

    return replay
