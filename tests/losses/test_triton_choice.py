"""When the Triton kernels are chosen and how they are called. A stub stands in for the kernels."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketrank import alrp_loss, ap_loss, rank_sort_loss, use_backend
from bucketrank.losses import backend, rankings

from .cases import localisation_errors, synthetic

CALLS: list[dict[str, Any]] = []


def _rank(logits: Tensor, targets: Tensor, localisation: Tensor | None, *, loss: str, delta: float, **settings: Any):
    """Stand in for the kernels: the same interface, computed by torch operations."""
    CALLS.append({"loss": loss, "delta": delta, **settings})
    values, prepared = rankings.rank_all(
        logits, targets, localisation, rankings.Settings(loss, "exact", "torch", delta, **settings)
    )
    return values[0], values[1] if len(values) > 1 else None, prepared


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    stub: Any = ModuleType("bucketrank.losses.triton")
    stub.unavailable_reason = lambda _: None
    stub.rank_with_triton = _rank
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(backend, "_has_triton", lambda: True)
    _forget()
    CALLS.clear()
    yield stub
    _forget()


def _forget() -> None:
    for function in (backend._reason_without_triton, backend._uses_triton, backend._log_once):
        function.cache_clear()


class _OnDevice:
    """The only property of logits that the choice reads."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)


def test_auto_chooses_triton_on_gpus_alone(kernels: ModuleType) -> None:
    choose: Any = backend.triton_for
    for device in ("cuda", "cuda:1", "xpu"):
        assert choose("exact", "auto", _OnDevice(device)) is kernels
        assert choose("exact", "torch", _OnDevice(device)) is None
        assert choose("pairwise", "auto", _OnDevice(device)) is None
        assert choose("bucketed", "triton", _OnDevice(device)) is None
    for device in ("cpu", "mps", "meta"):
        assert choose("exact", "auto", _OnDevice(device)) is None


def test_one_line_says_why_triton_is_not_used(kernels: Any, caplog: pytest.LogCaptureFixture) -> None:
    kernels.unavailable_reason = lambda device: f"{device} is too old"
    choose: Any = backend.triton_for
    with caplog.at_level(logging.WARNING):
        for device in ("cuda:0", "cuda:0", "cpu"):
            assert choose("exact", "auto", _OnDevice(device)) is None
    assert caplog.messages == [
        "ranking losses on cuda use torch operations instead of Triton kernels: cuda:0 is too old"
    ]
    with (
        use_backend("triton"),
        pytest.raises(ValueError, match="use_backend: the Triton kernels cannot rank tensors on cpu: cpu is too old"),
    ):
        ap_loss(torch.zeros(2), torch.ones(2))


@pytest.mark.usefixtures("kernels")
def test_without_triton_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_has_triton", lambda: False)
    with pytest.raises(ImportError, match=r'"triton" needs Triton.*: Triton is not installed'), use_backend("triton"):
        pass
    choose: Any = backend.triton_for
    assert choose("exact", "auto", _OnDevice("cuda")) is None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("sizes", [None, [100, 200]], ids=["one", "two"])
def test_the_kernels_get_all_rankings_at_once(sizes: list[int] | None, compiled: bool) -> None:
    logits, targets = synthetic(300, 40)
    errors = localisation_errors(targets).float()

    def train(leaf: Tensor, boxes: Tensor) -> Tensor:
        settings: dict[str, Any] = {"sizes": sizes, "max_positives": 64}
        terms = [ap_loss(leaf, targets, **settings), *rank_sort_loss(leaf, targets, **settings)]
        return torch.stack([*terms, *alrp_loss(leaf, targets, boxes, **settings)]).sum()

    run = torch.compile(train, fullgraph=True, backend="aot_eager") if compiled else train
    answers = []
    for name in ("torch", "triton"):
        leaf, boxes = logits.clone().requires_grad_(), errors.clone().requires_grad_()
        with use_backend(name):
            loss = (train if name == "torch" else run)(leaf, boxes)
            loss.backward()
        answers.append((loss.detach(), leaf.grad, boxes.grad))
    torch.testing.assert_close(answers[0], answers[1])
    assert {call["loss"] for call in CALLS} == {"ap", "rs", "alrp"}
    assert all(call["sizes"] == tuple(sizes or [300]) and call["max_positives"] == 64 for call in CALLS)
    assert len(CALLS) == (6 if compiled else 3)  # compiled, the backward pass computes the forward pass again
