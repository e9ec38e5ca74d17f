"""The exact losses on a CUDA or ROCm device: graphs, waits, streams, equality with the CPU, mixed precision.

Run them with ``pytest tests/losses/triton/test_gpu.py``; without a device they are skipped.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bucketrank import alrp_loss, rank_sort_loss
from bucketrank.losses.triton import rank_with_triton, unavailable_reason

from ...device_waits import no_waits
from ..cases import DELTAS, LOSSES, RANKING, answer, assert_same, hard_inputs, localisation_errors, synthetic, total
from ..oracle import Answer

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm device", allow_module_level=True)
if reason := unavailable_reason(torch.device("cuda", 0)):
    pytest.skip(reason, allow_module_level=True)

NAMES = {"ap": "ap", "interpolated_ap": "interpolated_ap", "rank_sort": "rs", "alrp": "alrp"}
every_loss = pytest.mark.parametrize("name", RANKING)


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
    with no_waits():
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


def _on_cpu(answered: Answer) -> Answer:
    return answered._replace(
        values=[value.cpu() for value in answered.values],
        gradients=[gradient.cpu() for gradient in answered.gradients],
    )


@every_loss
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.1])
def test_collapsed_logits(spread: float, name: str) -> None:
    logits, targets = synthetic(200_000, 300)
    logits = logits * spread - 4.6
    expected = answer(LOSSES[name].compute, logits, targets, delta=0.5, way=("exact", "auto"))
    got = answer(LOSSES[name].compute, logits.cuda(), targets.cuda(), delta=0.5, way=("exact", "auto"))
    assert_same(_on_cpu(got), expected)


@every_loss
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_slices_that_are_not_aligned(shift: int, name: str) -> None:
    logits, targets = synthetic(10_003, 100)
    expected = answer(LOSSES[name].compute, logits[shift:], targets[shift:], delta=0.5, way=("exact", "auto"))
    moved = logits.cuda()[shift:], targets.cuda()[shift:]
    assert_same(_on_cpu(answer(LOSSES[name].compute, *moved, delta=0.5, way=("exact", "auto"))), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    logits, targets = (tensor.cuda() for tensor in synthetic(50_000, 500))
    errors = localisation_errors(targets).to(dtype).requires_grad_()
    leaf = logits.to(dtype).requires_grad_()
    total(alrp_loss(leaf, targets, errors)).backward()
    wide, wide_errors = leaf.detach().double().requires_grad_(), errors.detach().double().requires_grad_()
    total(alrp_loss(wide, targets, wide_errors)).backward()
    for ours, theirs in ((leaf.grad, wide.grad), (errors.grad, wide_errors.grad)):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == dtype
        # Relative to the largest number, or the distance of float16 numbers next to 0.
        limits = torch.finfo(dtype)
        allowed = limits.eps * max(theirs.abs().max().item(), limits.tiny)
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=allowed)


@pytest.mark.parametrize("sizes", [None, [12_000, 0, 8_000]], ids=["one", "unequal"])
def test_reduce_overhead(sizes: list[int] | None) -> None:
    """CUDA graphs by ``torch.compile``: with a capacity inside the graph, without one outside of it."""
    for capacity in (300, None):

        def train(logits: Tensor, targets: Tensor, capacity: int | None = capacity) -> Tensor:
            return total(rank_sort_loss(logits * 2, targets, sizes=sizes, max_positives=capacity))

        compiled = torch.compile(train, mode="reduce-overhead", fullgraph=True)
        for seed in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            logits, targets = (tensor.cuda() for tensor in synthetic(20_000, 200, seed=seed))
            ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
            compiled(ours, targets).backward()
            train(theirs, targets).backward()
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_usual_graph_recipe_with_unequal_sizes() -> None:
    """Warm up on a side stream, capture on the stream of the graph, use other sizes, replay."""
    logits, targets = (tensor.cuda() for tensor in synthetic(20_000, 200))
    leaf = logits.clone().requires_grad_()
    sizes = [12_000, 1_000, 7_000]

    def train() -> None:
        leaf.grad = None
        total(rank_sort_loss(leaf, targets, sizes=sizes, max_positives=300)).backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    captured = leaf.grad
    assert captured is not None
    for size in range(200):
        rank_sort_loss(logits, targets, sizes=[size, 20_000 - size], max_positives=300)
    graph.replay()
    torch.cuda.synchronize()
    expected = logits.clone().requires_grad_()
    total(rank_sort_loss(expected, targets, sizes=sizes, max_positives=300)).backward()
    assert expected.grad is not None
    assert torch.equal(captured, expected.grad)


def test_side_streams() -> None:
    logits, targets = (tensor.cuda() for tensor in synthetic(50_000, 500))
    sizes = [30_000, 0, 20_000]
    expected = rank_sort_loss(logits, targets, sizes=sizes, reduction="none").ranking
    streams = [torch.cuda.Stream() for _ in range(4)]
    values = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            values.append(rank_sort_loss(logits, targets, sizes=sizes, reduction="none").ranking)
    torch.cuda.synchronize()
    assert all(torch.equal(value, expected) for value in values)


def test_cuda_as_the_default_device() -> None:
    logits, targets = (tensor.cuda() for tensor in synthetic(5_000, 50))
    with torch.device("cuda"):
        terms = rank_sort_loss(logits, targets, sizes=[3_001, 1_999])
    assert all(term.isfinite() for term in terms)


def test_deterministic_mode() -> None:
    logits, targets = (tensor.cuda() for tensor in synthetic(50_000, 500))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        leaf = logits.requires_grad_()
        total(rank_sort_loss(leaf, targets, sizes=[30_000, 20_000])).backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert leaf.grad is not None
