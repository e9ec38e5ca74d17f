"""Calls of the losses that reach the Triton kernels: eager and compiled, with and without a capacity, of any sizes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor

from bucketrank import alrp_loss, ap_loss, rank_sort_loss, use_backend
from bucketrank.losses import autograd
from bucketrank.losses.triton import launch, memory, rank_with_triton

from ...ptx.device import Device
from ..cases import localisation_errors, synthetic
from .harness import compute

pytestmark = pytest.mark.usefixtures("device")

KERNELS = ["write_keys", "place_positives", "fill_buckets", "compare_positives", "finish_rankings", "demote_positives"]


def _gradients(run: Any, name: str, logits: Tensor, errors: Tensor) -> list[Tensor | None]:
    leaf, boxes = logits.clone().requires_grad_(), errors.clone().requires_grad_()
    with use_backend(name):  # type: ignore[arg-type]
        loss = run(leaf, boxes)
        loss.backward()
    return [loss.detach(), leaf.grad, boxes.grad]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("max_positives", [None, 64])
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", [None, [100, 200]], ids=["one", "two"])
def test_all_losses_equal_torch_operations(
    device: Device, sizes: list[int] | None, mode: str, max_positives: int | None
) -> None:
    logits, targets = synthetic(300, 40)
    errors = localisation_errors(targets).float()

    def train(leaf: Tensor, boxes: Tensor) -> Tensor:
        settings: dict[str, Any] = {"sizes": sizes, "max_positives": max_positives}
        terms = [ap_loss(leaf, targets, **settings), *rank_sort_loss(leaf, targets, **settings)]
        return torch.stack([*terms, *alrp_loss(leaf, targets, boxes, **settings)]).sum()

    expected = _gradients(train, "torch", logits, errors)
    device.launches.clear()
    run = torch.compile(train, fullgraph=True, backend="aot_eager") if mode == "compiled" else train
    torch.testing.assert_close(_gradients(run, "triton", logits, errors), expected)
    # Compiled without a capacity, the backward pass computes the forward pass again.
    forward_passes = 6 if mode == "compiled" and max_positives is None else 3
    assert device.launches["fill_buckets"] == forward_passes
    assert device.launches["write_gradient"] == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_half_precision(dtype: torch.dtype) -> None:
    logits, targets = synthetic(300, 40)
    answers = []
    for run in (ap_loss, torch.compile(ap_loss, fullgraph=True, backend="aot_eager")):
        leaf = logits.to(dtype).requires_grad_()
        with use_backend("triton"):
            loss = run(leaf, targets, max_positives=50)
            loss.backward()
        assert loss.dtype is torch.float32
        answers.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)


def test_compiled_with_changing_sizes() -> None:
    run = torch.compile(ap_loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (300, 2_000, 2_500):
        logits, targets = synthetic(size, 40)
        leaf, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        with use_backend("triton"):
            run(leaf, targets, max_positives=50).backward()
            ap_loss(other, targets, max_positives=50).backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="needs torch 2.8 or newer")
def test_only_ops_that_do_not_wait_may_be_captured() -> None:
    """``torch.compile(mode="reduce-overhead")`` captures everything that is not tagged."""
    unsafe = torch.Tag.cudagraph_unsafe
    assert unsafe in autograd._rank_op._opoverload.tags
    assert unsafe in autograd._gradient_op._opoverload.tags
    assert unsafe not in autograd._rank_within_capacity_op._opoverload.tags
    assert unsafe not in autograd._gradient_within_capacity_op._opoverload.tags


def test_torch_without_nonzero_static_waits_once() -> None:
    logits, targets = synthetic(300, 40)
    expected = compute("rank_sort", logits, targets, 0.5, max_positives=60)
    with mock.patch.object(torch, "nonzero_static", side_effect=NotImplementedError("CUDA backend")):
        got = compute("rank_sort", logits, targets, 0.5, max_positives=60)
        crowded = compute("rank_sort", logits, targets, 0.5, max_positives=30)
    pairs = zip(got.values + got.gradients, expected.values + expected.gradients, strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert crowded.values[0].isnan().all()


@pytest.mark.parametrize(
    "kernel", [object(), SimpleNamespace(function=0, packed_metadata=(), run=lambda x, y, z: None)]
)
def test_another_triton_launches_the_kernels_itself(
    device: Device, kernel: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiled kernel without the internal attributes, or with a launcher of another signature."""
    logits, targets = synthetic(300, 40)
    expected = compute("rank_sort", logits, targets, 0.5)
    monkeypatch.setattr(launch, "_compiled", dict.fromkeys(launch._compiled, kernel))
    monkeypatch.setattr(launch.Launcher, "is_direct", True)
    device.launches.clear()
    for _ in range(2):
        got = compute("rank_sort", logits, targets, 0.5)
        torch.testing.assert_close(got.values + got.gradients, expected.values + expected.gradients, rtol=0, atol=0)
    assert device.launches == dict.fromkeys(KERNELS, 2) | {"write_gradient": 4}
    assert [message.split("(")[0] for message in caplog.messages] == [
        f"Triton {triton.__version__} launches kernels in another way "
    ]


def test_no_kernel_reads_half_precision_localisation(device: Device) -> None:
    """Triton 3.2 ends the process when it compiles a conversion from bfloat16 to float64."""
    logits, targets = synthetic(300, 40)
    errors = localisation_errors(targets).bfloat16()
    device.executions.clear()
    compute("alrp", logits, targets, 0.5, localisation=errors)
    loaded, _ = device.bytes_moved("localisation")
    assert loaded == 40 * torch.float32.itemsize


class TestStarts:
    """The boundaries of rankings of unequal sizes are uploaded once, and stay where a captured graph may read them."""

    SIZES = (3, 0, 5)

    @pytest.fixture(autouse=True)
    def _forget(self) -> Iterator[None]:
        with mock.patch.dict(memory._kept, clear=True), mock.patch.object(memory, "_captured", []):
            yield

    def test_once_per_combination(self) -> None:
        first = memory.upload_starts(self.SIZES, torch.device("cpu"))
        assert first is not None
        assert first.tolist() == [0, 3, 3, 8]
        assert memory.upload_starts(self.SIZES, torch.device("cpu")) is first

    def test_one_ranking_has_none(self) -> None:
        assert memory.upload_starts((7,), torch.device("cpu")) is None

    def test_the_default_device_does_not_matter(self) -> None:
        with torch.device("meta"):  # as torch.set_default_device("cuda") would
            uploaded = memory.upload_starts(self.SIZES, torch.device("cpu"))
        assert uploaded is not None
        assert uploaded.device.type == "cpu"
        logits, targets = synthetic(8, 3)
        with torch.device("meta"):
            first, _, _ = rank_with_triton(
                logits, targets, None, loss="ap", delta=0.5, sizes=self.SIZES, max_positives=None
            )
        assert first.shape == (3,)

    def test_a_captured_graph_keeps_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The warm-up on another stream has uploaded them; a hundred other sizes follow before the replay."""
        warm = memory.upload_starts(self.SIZES, torch.device("cpu"))
        monkeypatch.setattr(memory, "_is_capturing", lambda _: True)
        captured = memory.upload_starts(self.SIZES, torch.device("cpu"))
        assert captured is warm
        monkeypatch.undo()
        for size in range(2 * memory.MAX_KEPT):
            memory.upload_starts((size, 1, 2), torch.device("cpu"))
        assert len(memory._kept) == memory.MAX_KEPT
        assert any(upload.starts is captured for upload in memory._captured)

    def test_an_upload_during_a_capture_is_not_shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its copy happens at the first replay, so that nobody else may read it before."""
        monkeypatch.setattr(memory, "_is_capturing", lambda _: True)
        captured = memory.upload_starts(self.SIZES, torch.device("cpu"))
        monkeypatch.undo()
        assert memory.upload_starts(self.SIZES, torch.device("cpu")) is not captured
        assert any(upload.starts is captured for upload in memory._captured)


def test_deterministic_mode() -> None:
    """No operation of the losses is refused by ``torch.use_deterministic_algorithms``."""
    logits, targets = synthetic(300, 40)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert compute("rank_sort", logits, targets, 0.5, sizes=(100, 200)).values[0].isfinite().all()
    finally:
        torch.use_deterministic_algorithms(before)
