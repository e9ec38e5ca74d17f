"""The exact losses on a CUDA or ROCm device: graphs, waits, equality with the CPU, mixed precision.

Run them with ``pytest tests/losses/triton/test_gpu.py``; without a device they are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from bucketrank.losses.triton import rank_with_triton, unavailable_reason

from ..cases import DELTAS, LOSSES, RANKING, answer, assert_same, hard_inputs, synthetic

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm device", allow_module_level=True)
if reason := unavailable_reason(torch.device("cuda")):
    pytest.skip(reason, allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not test the device", allow_module_level=True)

NAMES = {"ap": "ap", "interpolated_ap": "interpolated_ap", "rank_sort": "rs", "alrp": "alrp"}
every_loss = pytest.mark.parametrize("name", RANKING)


@contextmanager
def _no_waits() -> Iterator[None]:
    """Make every wait of the host for the device an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_loss
@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_definition(dtype: torch.dtype, delta: float, name: str) -> None:
    for logits, targets in hard_inputs().values():
        moved = logits.cuda().to(dtype), targets.cuda().to(dtype)
        got = answer(LOSSES[name].compute, *moved, delta=delta, way=("exact", "auto"))
        on_host = got._replace(values=[v.cpu() for v in got.values], gradients=[g.cpu() for g in got.gradients])
        assert_same(on_host, LOSSES[name].oracle(logits, targets, delta))


@every_loss
@pytest.mark.parametrize(("size", "positives"), [(100_000, 1_000), (2_000_000, 3_000), (300_000, 20_000)])
def test_equals_the_cpu(size: int, positives: int, name: str) -> None:
    logits, targets = synthetic(size, positives)
    expected = answer(LOSSES[name].compute, logits, targets, delta=0.5, way=("exact", "auto"))
    got = answer(LOSSES[name].compute, logits.cuda(), targets.cuda(), delta=0.5, way=("exact", "auto"))
    assert_same(
        got._replace(values=[v.cpu() for v in got.values], gradients=[g.cpu() for g in got.gradients]), expected
    )


@every_loss
def test_repeated_runs_give_the_same_bits(name: str) -> None:
    logits, targets = (tensor.cuda() for tensor in synthetic(2_000_000, 300))
    runs = [answer(LOSSES[name].compute, logits, targets, delta=0.5, way=("exact", "auto")) for _ in range(5)]
    for run in runs[1:]:
        pairs = zip(run.values + run.gradients, runs[0].values + runs[0].gradients, strict=True)
        assert all(torch.equal(ours, first) for ours, first in pairs)


@every_loss
@pytest.mark.parametrize("sizes", [(50_000,), (25_000, 25_000), (30_000, 0, 20_000)])
def test_a_capacity_needs_no_wait(sizes: tuple[int, ...], name: str) -> None:
    logits, targets = (tensor.cuda() for tensor in synthetic(50_000, 500))
    errors = torch.rand(600, device="cuda") if name == "alrp" else None

    def train() -> None:
        first, second, ranking = rank_with_triton(
            logits, targets, errors, loss=NAMES[name], delta=0.5, sizes=sizes, max_positives=600
        )
        ranking.backward(first, second)

    train()  # compiles the kernels
    with _no_waits():
        train()


@every_loss
@pytest.mark.parametrize("sizes", [(20_000,), (12_000, 8_000)])
def test_a_captured_graph_ranks_new_logits(sizes: tuple[int, ...], name: str) -> None:
    logits, targets = (tensor.cuda() for tensor in synthetic(20_000, 200))
    errors = torch.rand(300, device="cuda") if name == "alrp" else None

    def train() -> list[Tensor]:
        first, second, ranking = rank_with_triton(
            logits, targets, errors, loss=NAMES[name], delta=0.5, sizes=sizes, max_positives=300
        )
        gradients = ranking.backward(torch.ones_like(first), None if second is None else torch.ones_like(second))
        return [tensor for tensor in (first, second, *gradients) if tensor is not None]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = train()
    for seed, positives in ((1, 200), (2, 50), (3, 0), (4, 300)):
        new_logits, new_targets = synthetic(20_000, positives, seed=seed)
        logits.copy_(new_logits)
        targets.copy_(new_targets)
        graph.replay()
        torch.cuda.synchronize()
        for ours, expected in zip(captured, train(), strict=True):
            assert torch.equal(ours, expected)
    targets.fill_(0.5)  # more positives than the capacity
    graph.replay()
    assert captured[0].isnan().all()


def test_mixed_precision_trains() -> None:
    layer = torch.nn.Linear(8, 4, device="cuda")
    data, (_, targets) = torch.randn(30, 8, device="cuda"), synthetic(120, 20)
    with torch.autocast("cuda", torch.bfloat16):
        logits = layer(data)
        ranking, sorting = LOSSES["rank_sort"].compute(logits, targets.view(30, 4).cuda())
    assert logits.dtype is torch.bfloat16
    assert ranking.dtype is torch.float32
    (ranking + sorting).backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_a_gradient_scaler_skips_the_step_of_a_broken_loss() -> None:
    layer = torch.nn.Linear(8, 4, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cuda")
    data, (_, targets) = torch.randn(30, 8, device="cuda"), synthetic(120, 20)
    before = layer.weight.detach().clone()
    for value in (torch.inf, 1.0):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            logits = layer(torch.where(data == data.max(), value, data))
            (loss,) = LOSSES["ap"].compute(logits, targets.view(30, 4).cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(layer.weight.detach(), before) == (value == torch.inf)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_device_that_is_not_the_current_one() -> None:
    logits, targets = synthetic(3_000, 50)
    losses = [LOSSES["ap"].compute(logits.to(device), targets.to(device))[0].cpu() for device in ("cuda:0", "cuda:1")]
    assert torch.equal(*losses)


def test_memory_at_ten_million_logits() -> None:
    logits, targets = (tensor.cuda() for tensor in synthetic(10_000_000, 20_000))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first, second, ranking = rank_with_triton(
        logits, targets, None, loss="rs", delta=0.5, sizes=(logits.numel(),), max_positives=None
    )
    ranking.backward(first, second)
    assert torch.cuda.max_memory_allocated() - before <= 1.5 * logits.nbytes
