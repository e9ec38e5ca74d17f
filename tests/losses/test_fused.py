"""The fused kernel among threads and processes, and the choice of backend."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from bucketrank import ap_loss, rank_sort_loss, use_backend
from bucketrank.losses import backend, fused, kernels
from bucketrank.losses.exact import Exact
from bucketrank.losses.fused import Fused, call_kernel
from bucketrank.settings.choices import Method

from .cases import answer, synthetic, total

FORKS_WORKERS = pytest.mark.skipif(sys.platform != "linux", reason="DataLoader forks its workers on Linux alone")


def _train(seed: int) -> tuple[float, float]:
    """Return the loss and a fingerprint of its gradient, for an input large enough for several threads."""
    logits, targets = synthetic(300_000, 20_000, seed=seed)
    logits.requires_grad_()
    loss = total(rank_sort_loss(logits, targets))
    loss.backward()
    assert logits.grad is not None
    return loss.item(), (logits.grad.double() * torch.arange(300_000)).sum().item()


def _compare(seed: int) -> tuple[float, float]:
    """Run the same kernels without autograd, which torch forbids in a fork of a process that has used it."""
    logits, targets = synthetic(300_000, 20_000, seed=seed)
    with torch.no_grad():
        loss = total(rank_sort_loss(logits, targets))
    gradient = Fused(logits, targets, 0.5).spread(np.ones(20_000), np.zeros(20_000))
    return loss.item(), (gradient.double() * torch.arange(300_000)).sum().item()


class _Losses(Dataset[tuple[float, float]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, seed: int) -> tuple[float, float]:
        # Workers run on one thread; two of ours all the same, to cross those of the parent with those of the child.
        with mock.patch.object(torch, "get_num_threads", return_value=2):
            return _compare(seed)


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("start", [pytest.param("fork", marks=FORKS_WORKERS), "spawn"])
# Torch and pytest hold threads of their own, of which Python 3.12 warns at a fork; DataLoader forks all the same.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_survives_dataloader_workers(start: str) -> None:
    expected = [_compare(seed) for seed in range(4)]  # the parent's threads are up and have run
    context = multiprocessing.get_context(start)
    loader = DataLoader(_Losses(), batch_size=None, num_workers=2, multiprocessing_context=context, timeout=100)
    torch.testing.assert_close([tuple(map(float, item)) for item in loader], expected)


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_many_python_threads_at_once() -> None:
    expected = [_train(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(_train, range(8))) == expected


@pytest.mark.slow
def test_leaves_torch_threads_and_numba_threading_alone() -> None:
    code = """
import torch, numba
torch.set_num_threads(2)
from bucketrank import rank_sort_loss
logits = torch.randn(300_000, requires_grad=True)
sum(rank_sort_loss(logits, (torch.rand(300_000) < 0.01).float())).backward()
assert torch.get_num_threads() == 2, torch.get_num_threads()
try:
    layer = numba.threading_layer()
except ValueError:
    layer = None  # numba has started none
assert layer is None, layer
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_works_where_nothing_can_be_cached() -> None:
    code = """
import numba, torch
njit = numba.njit

def njit_without_a_place(cache=False, **settings):
    def decorate(function):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**settings)(function)
    return decorate

numba.njit = njit_without_a_place
from bucketrank import ap_loss, use_backend
with use_backend("fused"):
    assert ap_loss(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), delta=0).item() == 0.5
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parts_cover_everything_once_in_order(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for size in (0, 1, 9, 10, 29, 30, 31, 100):
        parts = fused.in_parts(lambda start, stop: list(range(start, stop)), size, smallest=10)
        assert [entry for part in parts for entry in part] == list(range(size))
        assert len(parts) == (1 if size < 20 else 2 * min(3, size // 10))


def test_an_error_in_a_part_is_raised(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def work(start: int, stop: int) -> None:
        if start > 0:
            raise RuntimeError(f"part {start} to {stop}")

    with pytest.raises(RuntimeError, match="part 5 to 10"):
        fused.in_parts(work, 20, smallest=10)


def test_cells_with_many_edges_are_searched() -> None:
    # One far positive leaves all others in one cell of the look-up table; and more threads than one.
    logits, targets = synthetic(300_000, 2_000)
    logits = logits * 1e-3
    logits[targets.argmax()] = 1e7
    loss = lambda *args, **kwargs: (ap_loss(*args, **kwargs),)  # noqa: E731
    ours, plain = (answer(loss, logits, targets, delta=1e-4 * 1e3, way=("exact", name)) for name in ("fused", "torch"))
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logits_next_to_an_edge_find_their_bucket(dtype: Any) -> None:
    # The edges s +- 0.1 are not float32 numbers: comparing with the rounded edges must give the same buckets.
    scores = np.sort(np.random.default_rng(0).normal(size=2_000).astype(dtype)).astype(np.float64)
    nearest = np.concatenate([scores - 0.1, scores + 0.1]).astype(dtype)
    ends = np.array([-np.inf, np.finfo(dtype).min, np.finfo(dtype).max, np.inf], dtype)
    logits = np.concatenate([nearest, np.nextafter(nearest, dtype(-9)), np.nextafter(nearest, dtype(9)), ends])
    edges, owners = np.empty(4_002), np.empty(4_000, np.int64)
    bounds, before = np.empty(4_000 + kernels.PADDING, dtype), np.empty(8_001, np.uint32)
    cells_per_unit = kernels.look_up_table(scores, 0.1, edges, owners, bounds, before)
    buckets = np.empty(logits.size, np.uint32)
    kernels.find_buckets(logits, edges[0], bounds, before, cells_per_unit, buckets)
    np.testing.assert_array_equal(buckets, np.searchsorted(edges[1:4_001], logits, side="right"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_buckets_found_again_are_the_buckets_kept(dtype: torch.dtype) -> None:
    # The buckets are kept in the memory of the first gradient: it is given away, and nobody writes there again.
    logits, targets = synthetic(300_000, 20_000)
    targets[::7] = -1
    logits[::7] = torch.nan
    logits = logits.to(dtype).requires_grad_()
    loss = total(rank_sort_loss(logits, targets.to(dtype)))
    kept, again, doubled = (
        torch.autograd.grad(loss, logits, torch.tensor(factor, dtype=dtype), retain_graph=True)[0]
        for factor in (1.0, 1.0, 2.0)
    )
    assert torch.equal(kept, again)
    assert torch.equal(2 * kept, doubled)
    assert len({gradient.data_ptr() for gradient in (kept, again, doubled)}) == 3
    assert kept.isfinite().all()
    assert kept.count_nonzero() > 0
    assert not kept[::7].any()


@pytest.fixture
def look_for_numba_again() -> Iterator[None]:
    """Let the backend forget whether numba can be imported, before and after the test."""
    backend._fused.cache_clear()
    yield
    backend._fused.cache_clear()


@pytest.mark.usefixtures("look_for_numba_again")
def test_the_choice_of_backend(monkeypatch) -> None:
    logits = torch.zeros(1)
    assert tuple(backend.METHODS) == get_args(Method)
    assert backend.comparison_of("exact", "auto", logits) is Fused
    assert backend.comparison_of("exact", "fused", logits) is Fused
    assert backend.comparison_of("exact", "torch", logits) is Exact
    assert backend.comparison_of("exact", "auto", logits.to("meta")) is Exact
    with pytest.raises(ValueError, match="the fused kernel takes CPU tensors, got one on meta"):
        backend.comparison_of("exact", "fused", logits.to("meta"))
    with (
        pytest.raises(ValueError, match="use_backend: expected one of auto, fused, torch, triton, got 'cuda'"),
        use_backend("cuda"),  # type: ignore[arg-type]
    ):
        pass
    with pytest.raises(KeyError), use_backend("torch"):
        raise KeyError
    assert backend.chosen_backend() == "auto"

    backend._fused.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert backend.comparison_of("exact", "auto", logits) is Exact
    with pytest.raises(ImportError, match=r"pip install \"bucketrank\[fast\]\""), use_backend("fused"):
        pass


@pytest.mark.usefixtures("look_for_numba_again")
def test_a_numba_that_cannot_be_imported_is_reported_once_and_not_used(monkeypatch, caplog) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name == "Fused":
                raise ImportError("Numba needs NumPy 2.2 or less")
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "bucketrank.losses.fused", Broken("fused"))
    logits, targets = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0])
    assert ap_loss(logits, targets, delta=0) == ap_loss(logits, targets, delta=0) == 0.5
    assert [record.message for record in caplog.records] == [
        "ranking losses use torch operations instead of the fused kernel: "
        "numba cannot be imported: Numba needs NumPy 2.2 or less"
    ]
    with pytest.raises(ImportError, match=r"Numba needs NumPy 2\.2 or less"), use_backend("fused"):
        pass


# Signals during compiled kernels: the exception of the signal handler is raised, not a SystemError.


class Alarm(BaseException):
    """Raised by the signal handler of these tests."""


@pytest.fixture
def alarms() -> Iterator[None]:
    """Raise Alarm at SIGALRM."""

    def handle(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, handle)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no timer signals")
@pytest.mark.usefixtures("alarms")
def test_interrupted_losses_raise_the_exception_of_the_signal_handler() -> None:
    logits, targets = synthetic(100_000, 2_000)
    logits.requires_grad_()
    raised: Counter[str] = Counter()

    def train() -> None:
        with use_backend("fused"):
            total(rank_sort_loss(logits, targets)).backward()

    train()  # compiles the kernels
    for tenths in range(50):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.002 + 1e-4 * tenths)
            while True:
                train()
        except BaseException as error:  # noqa: BLE001, PERF203 (a SystemError, if the test fails)
            raised[type(error).__name__] += 1
    assert raised == {"Alarm": 50}


def raises(error: BaseException) -> None:
    raise error


def caused_by(cause: BaseException | None) -> SystemError:
    error = SystemError("returned a result with an exception set")
    error.__cause__ = cause
    return error


def test_the_first_cause_is_raised() -> None:
    assert call_kernel(max, 1, 2) == 2
    interrupt = KeyboardInterrupt()
    for error in (caused_by(interrupt), caused_by(caused_by(interrupt))):
        with pytest.raises(KeyboardInterrupt) as raised:
            call_kernel(raises, error)
        assert raised.value is interrupt
        assert interrupt.__context__ is None


def test_a_system_error_without_a_cause_stays() -> None:
    error = caused_by(caused_by(None))
    with pytest.raises(SystemError) as raised:
        call_kernel(raises, error)
    assert raised.value is error
