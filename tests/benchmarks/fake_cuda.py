"""A stand-in for the parts of ``torch.cuda`` that the benchmarks use, so that their code for GPUs runs without one.

It replaces attributes that exist, so that a wrong name fails, and its classes take the arguments of the real ones.
Time passes on the device only when work is queued with :meth:`FakeCuda.work`; reading an event before the device has
reached it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from benchmarks import timing


class FakeCuda:
    """The state of the device: its queue of work, its memory, and what happened."""

    def __init__(self, tick: float = 0.0) -> None:
        self.tick = tick  # milliseconds that pass before an event, as if every call queued that much work
        self.now = 0.0  # milliseconds of all queued work
        self.finished = 0.0  # milliseconds that the host has waited for
        self.allocated = self.peak = 0
        self.log: list[str] = []
        self.capturing = False

    def work(self, milliseconds: float, *, bytes_: int = 0) -> None:
        """Queue work; it holds ``bytes_`` of memory while it runs."""
        self.now += milliseconds
        self.peak = max(self.peak, self.allocated + bytes_)

    def synchronize(self, device: object = None) -> None:
        assert not self.capturing, "a capture cannot wait"
        self.finished = self.now

    def memory_allocated(self, device: object = None) -> int:
        return self.allocated

    def max_memory_allocated(self, device: object = None) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self.peak = self.allocated

    def event(self, **arguments: Any) -> FakeEvent:
        assert arguments == {"enable_timing": True}, "other events have no time"
        return FakeEvent(self)

    def stream(self) -> FakeStream:
        return FakeStream(self)

    @contextmanager
    def use_stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append("enter side stream")
        yield
        self.log.append("leave side stream")

    @contextmanager
    def graph(self, cuda_graph: FakeGraph, pool: object = None, stream: FakeStream | None = None) -> Iterator[None]:
        assert isinstance(cuda_graph, FakeGraph)
        assert stream is not None, "the stream of the warm-up"
        self.log.append("capture")
        self.capturing, before = True, self.now
        yield
        self.capturing = False
        cuda_graph.milliseconds, self.now = self.now - before, before  # captured work does not run

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the functions and classes of ``torch.cuda``."""
        replaced = {
            "synchronize": self.synchronize,
            "memory_allocated": self.memory_allocated,
            "max_memory_allocated": self.max_memory_allocated,
            "reset_peak_memory_stats": self.reset_peak_memory_stats,
            "Event": self.event,
            "Stream": self.stream,
            "current_stream": self.stream,
            "stream": self.use_stream,
            "CUDAGraph": lambda: FakeGraph(self),
            "graph": self.graph,
            "device": lambda device: nullcontext(),
        }
        for name, fake in replaced.items():
            monkeypatch.setattr(torch.cuda, name, fake)  # raises if there is no such name
        monkeypatch.setattr(timing, "cache_buffer", lambda device: FakeCacheBuffer(self))


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.at: float | None = None

    def record(self) -> None:
        self.cuda.work(self.cuda.tick)
        self.at = self.cuda.now

    def synchronize(self) -> None:
        assert self.at is not None, "an event that was recorded"
        self.cuda.finished = max(self.cuda.finished, self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.at is not None
        assert end.at is not None
        assert end.at <= self.cuda.finished, "the device has not reached the event"
        return end.at - self.at


class FakeCacheBuffer:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def zero_(self) -> None:
        self.cuda.work(100.0)
        self.cuda.log.append("clear cache")


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def wait_stream(self, other: FakeStream) -> None:
        assert isinstance(other, FakeStream)
        self.cuda.log.append("wait for stream")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.milliseconds: float | None = None

    def replay(self) -> None:
        assert self.milliseconds is not None, "a graph that was captured"
        self.cuda.work(self.milliseconds)
        self.cuda.log.append("replay")
