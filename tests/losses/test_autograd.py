"""Autograd, custom ops, torch.compile, autocast, and the same bits every time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketrank import alrp_loss, ap_loss, dr_loss, quality_focal_loss, rank_sort_loss
from bucketrank.losses import autograd, rankings
from bucketrank.losses.backend import comparison_of
from bucketrank.losses.comparison import Comparison
from bucketrank.losses.terms import RANKING_LOSSES

from ..threads import torch_threads
from .cases import EVERY, FAITHFUL, Way, synthetic, total, use_backend

every_way = pytest.mark.parametrize("way", EVERY, ids="-".join)


# Torch warns of itself while it copies the inputs.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("sizes", [None, [20, 30]], ids=["one", "two"])
@pytest.mark.parametrize(
    ("loss", "way"), [(loss, way) for loss in RANKING_LOSSES for way in (FAITHFUL if loss == "alrp" else EVERY)]
)
def test_opcheck(loss: str, sizes: list[int] | None, way: Way) -> None:
    method, backend = way
    logits, targets = synthetic(50, 7)
    localisation = torch.linspace(0, 1, 7, requires_grad=True) if loss == "alrp" else None
    one = torch.ones(() if sizes is None else len(sizes))
    errors = None if localisation is None else localisation.detach()
    state = [torch.empty(0, dtype=dtype) for dtype in (torch.uint8, torch.int64, torch.int8)]
    ops = (
        (None, autograd._rank_op, autograd._gradient_op),
        (10, autograd._rank_within_capacity_op, autograd._gradient_within_capacity_op),
    )
    with use_backend(backend) as name:
        for capacity, op, gradient_op in ops:
            settings = (loss, method, name, 0.5, sizes, capacity)
            for flat in (logits.detach(), logits.double(), logits.half()):
                targets_of_dtype = targets.to(torch.promote_types(flat.dtype, torch.float32))
                torch.library.opcheck(op, (flat.requires_grad_(), targets_of_dtype, localisation, *settings))
            torch.library.opcheck(gradient_op, (one, one, *state, logits.detach(), targets, errors, *settings))
        if way == ("exact", "fused"):
            inputs = logits.detach(), targets, localisation, loss, method, name, 0.5, sizes, None
            torch.library.opcheck(autograd._rank_with_gradients_op, inputs)
            kept = autograd._rank_with_gradients_op(*inputs)[3:]
            inputs = logits.detach(), targets, errors, *inputs[3:]
            torch.library.opcheck(autograd._scale_gradients_op, (one, one, *(each.detach() for each in kept), *inputs))


@pytest.mark.sampled(5)
@every_way
@pytest.mark.parametrize("positives", [0, 7])
def test_compiles_as_one_graph(positives: int, way: Way) -> None:
    method, backend = way

    def train(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ranking, sorting = rank_sort_loss(logits * 2, targets, method=method)
        return ranking + 3 * sorting + ap_loss(logits, targets, method=method)

    logits, targets = synthetic(300, positives)
    eager, compiled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    with use_backend(backend):
        expected = train(eager, targets)
        expected.backward()
        # aot_eager traces forward and backward as inductor does, without generating C++.
        got = torch.compile(train, fullgraph=True, backend="aot_eager")(compiled, targets)
        got.backward()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(compiled.grad, eager.grad)


@pytest.mark.parametrize("sizes", [None, [120, 0, 180]], ids=["one", "three"])
@pytest.mark.parametrize("delta", [0.0, 0.5, 1e-17], ids=["zero", "usual", "too small"])
def test_compiled_gradients_of_the_fused_kernel(delta: float, sizes: list[int] | None) -> None:
    """They come from the forward pass; with a delta too small for the kernel, from that of the definition."""
    logits, targets = synthetic(300, 20)
    logits[7], targets[7] = torch.nan, -1.0
    errors = torch.linspace(0.1, 0.9, 20)

    def train(logits: Tensor, errors: Tensor) -> Tensor:
        terms = rank_sort_loss(logits, targets, delta=delta, sizes=sizes, reduction="none" if sizes else "mean")
        first, second = alrp_loss(logits, targets, errors, delta=delta, sizes=sizes)
        weights = torch.tensor([1.0, 2.0, 3.0]) if sizes else torch.tensor(2.0)
        return (weights * (terms.ranking + 5 * terms.sorting)).sum() + 7 * first + 11 * second

    got = []
    with use_backend("fused"):
        for run in (train, torch.compile(train, fullgraph=True, backend="aot_eager")):
            leaf, boxes = logits.clone().requires_grad_(), errors.clone().requires_grad_()
            value = run(leaf, boxes)
            value.backward()
            got.append((value.detach(), leaf.grad, boxes.grad))
    torch.testing.assert_close(got[1], got[0])


@pytest.mark.sampled(3)
@every_way
def test_does_not_break_the_graph_where_it_may_be_broken(way: Way) -> None:
    """Torch breaks the graph at an op whose outputs have an unknown length, unless ``fullgraph`` forbids it."""
    method, backend = way
    logits, targets = synthetic(300, 7)
    with use_backend(backend):
        explained = torch._dynamo.explain(lambda leaf: 2 * ap_loss(leaf * 2, targets, method=method))(logits)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@pytest.mark.slow
def test_compiles_with_inductor_and_changing_sizes() -> None:
    compiled = torch.compile(lambda logits, targets: total(rank_sort_loss(logits.sigmoid(), targets)), fullgraph=True)
    for size, positives in ((300, 7), (300, 30), (500, 9)):
        logits, targets = synthetic(size, positives)
        ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        got, expected = compiled(ours, targets), total(rank_sort_loss(theirs.sigmoid(), targets))
        got.backward()
        expected.backward()
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("positives", [0, 7, 300])
def test_dr_compiles_as_one_graph(positives: int) -> None:
    logits, targets = synthetic(300, positives)
    answers = []
    for run in (dr_loss, torch.compile(dr_loss, fullgraph=True, backend="aot_eager")):
        leaf = logits.clone().requires_grad_()
        loss = run(leaf, targets)
        loss.backward()
        answers.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(answers[0], answers[1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_alrp_compiles_as_one_graph(dtype: torch.dtype) -> None:
    logits, targets = synthetic(300, 7)
    boxes = torch.linspace(0.1, 0.9, 7).to(dtype)
    answers = []
    for run in (alrp_loss, torch.compile(alrp_loss, fullgraph=True, backend="aot_eager")):
        leaf, errors = logits.clone().requires_grad_(), boxes.clone().requires_grad_()
        classification, localisation = run(leaf, targets, errors)
        (classification + 2 * localisation).backward()
        answers.append((classification.detach(), localisation.detach(), leaf.grad, errors.grad))
    torch.testing.assert_close(answers[0], answers[1])


@every_way
@pytest.mark.parametrize("sizes", [None, [20, 30]], ids=["one", "two"])
@pytest.mark.parametrize("positives", [0, 7])
def test_memory_is_freed_without_the_garbage_collector(positives: int, sizes: list[int] | None, way: Way) -> None:
    method, backend = way
    logits, targets = synthetic(50, positives)
    logits.requires_grad_()
    gc.disable()
    try:
        with use_backend(backend):
            loss = ap_loss(logits, targets, method=method, sizes=sizes, reduction="none")
        assert loss.grad_fn is not None
        prepared = weakref.ref(loss.grad_fn.prepared)  # type: ignore[attr-defined]
        assert prepared() is not None
        loss.sum().backward()
        del loss
        assert prepared() is None
    finally:
        gc.enable()


@pytest.mark.sampled(3)
@every_way
def test_the_backward_pass_uses_the_backend_of_the_forward_pass(way: Way, monkeypatch) -> None:
    method, backend = way
    logits, targets = synthetic(50, 7)
    logits.requires_grad_()
    with use_backend(backend):
        loss = ap_loss(logits, targets, method=method)
    asked = []

    def listen(method: str, backend: str, logits: torch.Tensor) -> type[Comparison]:
        asked.append((method, backend))
        return comparison_of(method, backend, logits)

    monkeypatch.setattr(rankings, "comparison_of", listen)
    loss.backward()
    assert asked == []  # nothing was chosen anew
    compiled = torch.compile(ap_loss, fullgraph=True, backend="aot_eager")
    with use_backend(backend) as name:
        loss = compiled(logits, targets, method=method)
    loss.backward()
    # The fused kernel keeps the gradients of the values; the others compute the forward pass again.
    assert asked == [(method, name)] * (1 if way == ("exact", "fused") else 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, targets, number: ap_loss(logits, targets, delta=number),
        lambda logits, targets, number: quality_focal_loss(logits, targets, beta=number),
        lambda logits, targets, number: dr_loss(logits, targets, margin=number),
    ],
    ids=["ap", "qfl", "dr"],
)
def test_a_setting_that_changes_between_calls_keeps_one_graph(loss: Callable[..., Tensor]) -> None:
    """From the second value on, the number is a symbol in the graph."""
    logits, targets = synthetic(50, 7)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for number in (0.5, 0.75, 1.0):
        torch.testing.assert_close(compiled(logits, targets, number), loss(logits, targets, number))


@pytest.mark.parametrize("loss", [ap_loss, lambda *inputs: rank_sort_loss(*inputs).sorting], ids=["ap", "sorting"])
@pytest.mark.parametrize("power", [1, 2], ids=["alone", "squared"])
def test_a_second_derivative_is_an_error(loss: Callable[..., Tensor], power: int) -> None:
    """Also where the gradient at the loss is a constant, so that nothing but the loss could be differentiated."""
    logits, targets = synthetic(50, 7)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logits, targets) ** power, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="have no second derivative: their gradient is defined, not derived"):
        gradient.sum().backward()


def test_create_graph_alone_is_no_error() -> None:
    logits, targets = synthetic(50, 7)
    logits.requires_grad_()
    (plain,) = torch.autograd.grad(ap_loss(logits, targets), logits)
    (graph,) = torch.autograd.grad(ap_loss(logits, targets), logits, create_graph=True)
    torch.testing.assert_close(graph.detach(), plain, rtol=0, atol=0)


@every_way
def test_autocast(way: Way) -> None:
    layer, data = torch.nn.Linear(8, 4), torch.randn(30, 8)
    _, targets = synthetic(120, 20)
    with use_backend(way[1]), torch.autocast("cpu", torch.bfloat16):
        logits = layer(data)
        loss = total(rank_sort_loss(logits, targets.view(30, 4), method=way[0]))
    assert logits.dtype is torch.bfloat16
    assert loss.dtype is torch.float32
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_small_gradients_survive_half_precision_with_a_scaled_loss() -> None:
    logits, targets = synthetic(60_000, 2_000)
    half = logits.half().requires_grad_()
    (ap_loss(half, targets) * 65536).backward()
    full = logits.half().float().requires_grad_()
    ap_loss(full, targets).backward()
    assert half.grad is not None
    assert full.grad is not None
    torch.testing.assert_close(half.grad.float() / 65536, full.grad, rtol=2e-3, atol=1e-9)


@pytest.mark.slow
@every_way
@pytest.mark.parametrize("threads", [1, 2])
def test_two_runs_give_the_same_bits(threads: int, way: Way) -> None:
    method, backend = way
    size, positives = (300_000, 20_000) if method == "exact" else (20_000, 500)
    logits, targets = synthetic(size, positives)
    answers: list[tuple[Any, ...]] = []
    with torch_threads(threads):
        for _ in range(3):
            leaf = logits.clone().requires_grad_()
            with use_backend(backend):
                terms = rank_sort_loss(leaf, targets, method=method)
                total(terms).backward()
            answers.append((*(term.detach() for term in terms), leaf.grad))
    for run in answers[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(run, answers[0], strict=True))


@pytest.mark.parametrize("way", FAITHFUL, ids="-".join)
def test_without_gradients(way: Way) -> None:
    logits, targets = synthetic(50, 7)
    with use_backend(way[1]), torch.no_grad():
        assert not ap_loss(logits.requires_grad_(), targets, method=way[0]).requires_grad
    with use_backend(way[1]), torch.inference_mode():
        assert ap_loss(logits.detach().clone(), targets, method=way[0]).isfinite()


def test_backward_inside_autocast_is_not_rounded() -> None:
    logits, targets = synthetic(500, 50, seed=3)
    gradients = []
    for enabled in (False, True):
        entries = logits.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ap_loss(entries, targets, method="pairwise").backward()
        assert entries.grad is not None
        gradients.append(entries.grad)
    assert torch.equal(*gradients)
