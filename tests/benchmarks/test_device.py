"""Clocks, memory and graphs of devices: the CPU for real, CUDA with a stand-in for ``torch.cuda``."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from benchmarks.losses.contenders import modes_of
from benchmarks.session import check_device, device_type
from benchmarks.timing import (
    WARM_UP,
    EventClock,
    TimedCall,
    WallClock,
    cache_buffer,
    capture,
    current_device,
    device_clock,
    has_allocator_statistics,
    interleave,
    peak_allocated,
    seconds_of,
)
from tests.benchmarks.fake_cuda import FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_each_device_has_its_clock(cuda: FakeCuda) -> None:
    assert isinstance(device_clock("cuda:1"), EventClock)
    assert isinstance(device_clock("xpu"), EventClock)
    assert isinstance(device_clock("cpu"), WallClock)
    clock = device_clock("mps")
    assert isinstance(clock, WallClock)
    assert clock.synchronize is torch.mps.synchronize
    with current_device("cuda:1"), current_device("cpu"):
        pass


def test_events_measure_the_work_of_the_call_alone(cuda: FakeCuda) -> None:
    cuda.work(500.0)  # still queued when the measurement starts
    assert seconds_of(lambda: cuda.work(250.0), device_clock("cuda")) == 0.25


def test_calls_on_a_gpu_take_turns(cuda: FakeCuda) -> None:
    calls = {"a": TimedCall(lambda: cuda.work(1.0)), "b": TimedCall(lambda: cuda.work(8.0))}
    samples = interleave(calls, rounds=2, clock=device_clock("cuda"))
    assert samples == {"a": {0: 0.001, 1: 0.001}, "b": {0: 0.008, 1: 0.008}}


def test_the_cache_is_cleared_before_each_timed_call_and_outside_its_time(cuda: FakeCuda) -> None:
    calls = {"a": TimedCall(lambda: cuda.work(1.0)), "b": TimedCall(lambda: cuda.work(8.0), untimed=1)}
    samples = interleave(calls, rounds=2, clock=device_clock("cuda:1", clear_cache=True))
    assert samples == {"a": {0: 0.001, 1: 0.001}, "b": {0: 0.008, 1: 0.008}}
    assert cuda.log == ["clear cache"] * 4
    for device in ("cpu", "xpu"):
        assert device_clock(device, clear_cache=True) == device_clock(device)
    assert len(cuda.log) == 4


@pytest.mark.parametrize(("cache", "expected"), [(50 << 20, 256 << 20), (192 << 20, 384 << 20)])
def test_the_buffer_is_larger_than_the_cache(cache: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=cache))
    assert cache_buffer("meta").nbytes == expected


def test_peak_memory_is_counted_from_the_start_of_the_call(cuda: FakeCuda) -> None:
    cuda.allocated = 1000
    cuda.work(1.0, bytes_=9000)  # an earlier peak
    assert peak_allocated(lambda: cuda.work(1.0, bytes_=70), "cuda") == 70
    assert has_allocator_statistics("cuda:0")
    assert not has_allocator_statistics("cpu")


def test_a_captured_step_is_replayed(cuda: FakeCuda) -> None:
    calls: list[int] = []

    def step() -> torch.Tensor:
        calls.append(len(calls))
        cuda.work(2.0)
        return torch.tensor(len(calls))

    replay = capture(step)
    assert cuda.log == ["wait for stream", "enter side stream", "leave side stream", "wait for stream", "capture"]
    assert len(calls) == WARM_UP + 1
    assert seconds_of(replay, device_clock("cuda")) == 0.002
    assert int(replay()) == WARM_UP + 1, "the output of the capture"
    assert len(calls) == WARM_UP + 1, "a replay does not call the step"


def test_the_stand_in_takes_the_arguments_of_torch() -> None:
    assert {"cuda_graph", "pool", "stream"} <= inspect.signature(torch.cuda.graph.__init__).parameters.keys()
    assert "enable_timing" in inspect.signature(torch.cuda.Event.__new__).parameters
    for name in ("record", "synchronize", "elapsed_time"):
        assert callable(getattr(torch.cuda.Event, name))
        assert callable(getattr(torch.xpu.Event, name))
    assert callable(torch.cuda.Stream.wait_stream)
    assert callable(torch.cuda.CUDAGraph.replay)
    for name in ("synchronize", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "device"):
        assert callable(getattr(torch.xpu, name))


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "abacus", "meta"])
def test_a_missing_device_is_refused_in_one_line(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(ValueError, match=f"^--device: expected a device that torch can use here, got '{device}'") as e:
        check_device(device)
    assert str(e.value).endswith("install its driver and a build of torch for it, or choose --device cpu")
    assert "\n" not in str(e.value)


def test_modes_by_device() -> None:
    assert device_type("cuda:3") == "cuda"
    assert list(modes_of("exact-triton", "cuda:1", compiled=True)) == ["eager", "compiled", "graph"]
    assert list(modes_of("focal", "cuda", compiled=True)) == ["compiled", "eager", "graph"]
    assert list(modes_of("focal", "cuda", compiled=False)) == ["eager", "graph"]
    assert list(modes_of("exact-torch", "cuda", compiled=True)) == ["eager", "compiled"]
    assert list(modes_of("focal", "xpu", compiled=True)) == ["compiled", "eager"]
    assert list(modes_of("focal", "cpu", compiled=True)) == ["eager", "compiled"]
    assert list(modes_of("pairwise", "cuda", compiled=True)) == ["eager"]
