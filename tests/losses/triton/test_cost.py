"""The cost of a call on a GPU, counted without one: launches, host waits, bytes moved, atomic additions, memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.launches import Launches, count_launches
from bucketrank import alrp_loss, ap_loss, rank_sort_loss, use_backend
from bucketrank.losses.triton import rank_with_triton, ranking

from ...ptx.device import Device, IdleDevice, emulate
from ..cases import RANKING, localisation_errors, synthetic
from .harness import NAMES, compute

# Operations for which the host waits until the device is idle, also those that wait only for some inputs.
WAITS = ("nonzero", "_local_scalar_dense", "item", "bincount", "index", "masked_select", "unique", "is_nonzero")
# Launches, forward and backward: four torch operations (compare, nonzero, zeros, sort), the rest are kernels.
LAUNCHES = {"ap": 10, "interpolated_ap": 10, "rank_sort": 11, "alrp": 10}

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def idle() -> Iterator[None]:
    """Launch kernels that do nothing: only the host works."""
    with emulate(device=IdleDevice(80)):
        yield


def _count(name: str, logits: Tensor, targets: Tensor, sizes: tuple[int, ...], max_positives: int | None) -> Launches:
    """Return what one call launches, forward and backward."""
    errors = localisation_errors(targets).float() if name == "alrp" else None
    with count_launches() as counted:
        first, second, ranked = rank_with_triton(
            logits, targets, errors, loss=NAMES[name], delta=0.5, sizes=sizes, max_positives=max_positives
        )
        ranked.backward(first, second)
    return counted


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("name", RANKING)
@pytest.mark.parametrize("rankings", [1, 4])
@pytest.mark.parametrize("max_positives", [None, 1500])
def test_launches_and_waits(max_positives: int | None, rankings: int, name: str) -> None:
    logits, targets = synthetic(100_000, 1_000)
    sizes = (100_000 // rankings,) * rankings
    counted = _count(name, logits, targets, sizes, max_positives)
    assert counted.launches == LAUNCHES[name] + (rankings > 1), vars(counted)
    assert counted.kernels.total() == LAUNCHES[name] - 4
    assert counted.waits == (1 if max_positives is None else 0), counted.waiting
    assert sum(counted.operations[wait] for wait in WAITS) == counted.waits, counted.operations


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("loss", [ap_loss, rank_sort_loss])
@pytest.mark.parametrize("max_positives", [None, 1500])
def test_the_function_adds_no_wait(max_positives: int | None, loss: Any) -> None:
    logits, targets = synthetic(100_000, 1_000)
    logits.requires_grad_()
    with use_backend("triton"), count_launches() as counted:
        terms = loss(logits, targets, max_positives=max_positives)
        (terms if isinstance(terms, Tensor) else terms.ranking + terms.sorting).backward()
    assert counted.waits == (1 if max_positives is None else 0), counted.waiting
    assert counted.launches <= 16, vars(counted)


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("sizes", [[10_000] * 22, [*range(500, 22_000, 1_000)]], ids=["equal", "unequal"])
def test_a_mean_launches_as_often_for_many_rankings(sizes: list[int]) -> None:
    logits, targets = synthetic(sum(sizes), 1_000)
    logits.requires_grad_()

    def train() -> None:
        terms = rank_sort_loss(logits, targets, sizes=sizes, max_positives=2_000)
        (terms.ranking + terms.sorting).backward()

    with use_backend("triton"):
        train()  # uploads the sizes
        with count_launches() as counted:
            train()
    assert counted.launches <= 27, vars(counted)
    assert counted.waits == 0


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 18), (torch.bfloat16, 12), (torch.float16, 12)])
def test_bytes_moved(device: Device, dtype: torch.dtype, limit: int) -> None:
    size, positives = 4_000, 40
    logits, targets = synthetic(size, positives)
    logits = torch.where(targets > 0, logits - 100, logits).to(dtype)  # all negatives are relevant: the worst case
    device.executions.clear()
    first, _, ranked = rank_with_triton(logits, targets, None, loss="rs", delta=0.5, sizes=(size,), max_positives=None)
    item = dtype.itemsize
    # One pass reads each logit and its target. The positives are read again, for their keys and their labels.
    assert device.bytes_moved("logits") == (item * (size + positives), 0)
    assert device.bytes_moved("targets") == (4 * (size + positives), 0)
    assert device.bytes_moved("kinds") == (0, size)
    forward = (item + 4 + 1) * size
    device.executions.clear()
    gradient, _ = ranked.backward(torch.ones_like(first), None)
    assert gradient.dtype == dtype
    assert device.bytes_moved("logits") == (item * (size - positives), 0)
    assert device.bytes_moved("kinds") == (size, 0)
    assert device.bytes_moved("gradient") == (0, item * size)
    assert forward + (2 * item + 1) * size <= limit * size
    # torch finds the positives: it reads the targets, writes a byte, and reads it twice.
    assert 7 + limit <= {torch.float32: 25}.get(dtype, 19)


def test_a_trained_detector_reads_few_logits_again(device: Device) -> None:
    logits, targets = synthetic(4_000, 40)
    logits = torch.where(targets > 0, logits + 100, logits)  # no negative is relevant
    first, _, ranked = rank_with_triton(logits, targets, None, loss="rs", delta=0.5, sizes=(4_000,), max_positives=None)
    device.executions.clear()
    ranked.backward(torch.ones_like(first), None)
    assert device.bytes_moved("logits") == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "limit"), [(0.005, 2_000), (0.05, 20_000)])
def test_atomic_additions_of_collapsed_logits(device: Device, spread: float, limit: int) -> None:
    size = 200_000
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0)) * spread - 4.6
    targets = torch.zeros(size)
    targets[:: size // 300] = 0.5
    before = device.atomics["fill_buckets"]
    compute("rank_sort", logits, targets, 0.5)
    assert device.atomics["fill_buckets"] - before <= limit


@pytest.mark.parametrize("positives", [500, 40_000])
def test_the_capacity_does_not_decide_how_many_copies_there_are(
    device: Device, positives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "COPIES", 64)
    targets = torch.zeros(3_000)
    targets[:50] = 0.5
    device.executions.clear()
    compute("ap", torch.linspace(0, 0, 3_000), targets, 0.5, max_positives=positives)
    # 64 copies of 100 buckets are added up; neighbouring threads may read the same bucket.
    loaded = [done.loaded["buckets"] for name, done in device.executions if name == "compare_positives"]
    assert loaded[0] >= 64 * 100 * 16


@pytest.mark.usefixtures("idle")
def test_memory() -> None:
    size, positives = 10_000_000, 20_000
    logits, targets = torch.empty(size), torch.zeros(size)
    targets[:positives] = 0.5
    largest: list[int] = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if not func.is_view:
                outputs = result if isinstance(result, (tuple, list)) else [result]
                largest.extend(output.nbytes for output in outputs)
            return result

    with Allocations():
        first, second, ranked = rank_with_triton(
            logits, targets, None, loss="rs", delta=0.5, sizes=(size,), max_positives=None
        )
        ranked.backward(first, second)
    # All that was ever allocated, as if nothing were freed, the mask of the positives and the gradient included.
    assert sum(largest) <= 1.5 * logits.nbytes


def test_every_function_reaches_the_kernels(device: Device) -> None:
    logits, targets = synthetic(300, 20)
    device.launches.clear()
    with use_backend("triton"):
        ap_loss(logits, targets)
        rank_sort_loss(logits, targets)
        alrp_loss(logits, targets, localisation_errors(targets).float())
    assert device.launches["fill_buckets"] == 3
