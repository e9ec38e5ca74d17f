"""Exact bucketing of CPU tensors in compiled loops: one pass over the logits forward, one backward.

The forward pass stores the bucket of every negative in the memory of the future gradient, and the backward pass
overwrites it. So no bucket is computed twice, and the buckets need no memory of their own.

The loops (``kernels.py``) run on Python threads. numba's threading layers start a second OpenMP beside torch's, crash
in forked workers, or cannot be called from two Python threads at once. Python threads have none of these problems, cost
nothing while idle, and follow ``torch.set_num_threads``.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from bucketrank.losses import kernels
from bucketrank.losses.comparison import Array, Comparison, can_place_edges

PartResult = TypeVar("PartResult")

# Min entries per thread. A second thread starts late, often on a core where an OpenMP thread still spins.
MIN_ENTRIES = 1 << 17
# Min positives per thread in the sums over positives, where a positive takes as long as hundreds of negatives.
MIN_POSITIVES = 1 << 13
PARTS_PER_THREAD = 2

_lock = Lock()
_pool: Executor | None = None


class Fused(Comparison):
    """Exact bucketing with the numbers of ``exact.py``, computed in numpy and the loops of ``kernels.py``."""

    xp: Any = np
    has_edges = True
    # Memory for the gradient. Until the backward pass returns it, it holds the bucket of every negative.
    gradient: Array | None = None

    def __init__(self, logits: Tensor, targets: Tensor, delta: float) -> None:
        self.delta = delta
        self.logits, self.targets = logits.detach().numpy(), targets.numpy()
        self.at = _positives(self.targets)
        self.scores = self.logits[self.at].astype(np.float64)
        order = self.scores.argsort()
        self.at, self.scores = self.at[order], self.scores[order]
        if not self.at.size:
            self.finite = self._all_finite()
            return
        self.finite = -np.inf < self.scores.item(0) <= self.scores.item(-1) < np.inf
        if self.finite and self.is_accurate():  # otherwise the definition replaces this comparison
            self.edges, self.owners, *self.tables = call_kernel(kernels.look_up_table, self.scores, delta, self.logits)
            self.gradient = np.empty_like(self.logits)
            self.finite = self._fill(self.gradient)

    @property
    def index(self) -> Tensor:
        return torch.from_numpy(self.at)

    @cached_property
    def labels(self) -> Array:
        return self.targets[self.at].astype(np.float64)

    @cached_property
    def windows(self) -> tuple[Array, Array, Array]:
        """See :func:`kernels.windows`."""
        x, low, high = call_kernel(kernels.windows, self.scores, self.delta)
        return x, low, high

    def _all_finite(self) -> bool:
        logits, targets = self.logits, self.targets
        return all(
            in_parts(lambda start, stop: call_kernel(kernels.all_finite, start, stop, logits, targets), targets.size)
        )

    def _fill(self, gradient: Array) -> bool:
        """Count the negatives of each bucket, store their buckets in ``gradient``, and check for finite input."""
        arguments = self.logits, self.targets, self.edges, *self.tables, _buckets_in(gradient)
        (self.buckets, finite), *parts = in_parts(
            lambda start, stop: call_kernel(kernels.fill_buckets, start, stop, *arguments), gradient.size
        )
        for buckets, part_finite in parts:
            self.buckets += buckets
            finite &= part_finite
        return bool(finite)

    def is_accurate(self) -> bool:
        if not self.scores.size:
            return True
        return can_place_edges(max(-self.scores.item(0), self.scores.item(-1)), self.delta)

    def vector(self, values: Tensor) -> Array:
        return values.double().numpy()  # numpy has no bfloat16

    def number(self, value: Tensor) -> Any:
        return value.item()

    def mean(self, errors: Array) -> Tensor:
        return torch.from_numpy(np.asarray(errors.sum() / errors.size, self.logits.dtype))

    def running_minimum(self, values: Array) -> Array:
        return np.minimum.accumulate(values)

    def ranks(self) -> tuple[Array, Array]:
        false_positives, rank = call_kernel(
            kernels.count_ranks, self.scores, self.edges, self.owners, self.buckets, self.delta
        )
        return false_positives, rank

    def false_positives(self) -> Array:
        return call_kernel(kernels.count_false_positives, self.edges, self.owners, self.buckets, self.delta)

    def spread(self, weights: Array, own: Array) -> Tensor:
        gradient, self.gradient = self.gradient, None
        if gradient is None:  # an earlier backward pass returned it
            gradient = np.empty_like(self.logits)
            self._fill(gradient)
        table = call_kernel(kernels.gradient_table, self.edges, self.owners, weights, self.delta)
        arguments = self.logits, self.edges[0], table, _buckets_in(gradient), gradient
        in_parts(lambda start, stop: call_kernel(kernels.write_gradient, start, stop, *arguments), gradient.size)
        gradient[self.at] = own
        return torch.from_numpy(gradient)

    def above(self, values: Array) -> Array:
        return call_kernel(kernels.sum_above, *self.windows, values)

    def above_worse(self, values: Array) -> Array:
        return _above_worse(self.windows, self.labels, values)

    def below_better(self, values: Array) -> Array:
        # Reversing the list turns "below and better" into "above and worse". The kernel takes two columns, so one is 0.
        windows = call_kernel(kernels.windows, -self.scores[::-1], self.delta)
        columns = np.stack([values[::-1], np.zeros_like(values)], 1)
        return _above_worse(windows, -self.labels[::-1], columns)[::-1, 0]


def _positives(targets: Array) -> Array:
    """Return the positions of the positives, ascending."""
    parts = in_parts(lambda start, stop: (start, (targets[start:stop] > 0).nonzero()[0]), targets.size)
    return np.concatenate([start + positions for start, positions in parts]) if len(parts) > 1 else parts[0][1]


def _buckets_in(gradient: Array) -> Array:
    """View the memory of ``gradient`` as unsigned integers, which hold bucket numbers."""
    return gradient.view(np.uint32 if gradient.itemsize == 4 else np.uint64)


def _above_worse(windows: tuple[Array, Array, Array], labels: Array, values: Array) -> Array:
    sums = np.empty_like(values)
    order = labels.argsort()
    in_parts(
        lambda start, stop: call_kernel(kernels.sum_above_worse, start, stop, *windows, order, labels, values, sums),
        labels.size,
        MIN_POSITIVES,
    )
    return sums


def in_parts(work: Callable[[int, int], PartResult], size: int, smallest: int = MIN_ENTRIES) -> list[PartResult]:
    """Call ``work(start, stop)`` for parts of ``range(size)`` on several threads, and return the results in order.

    The parts depend only on the size and the number of threads, so that sums over them are reproducible.
    """
    threads = min(torch.get_num_threads(), size // smallest) if size >= 2 * smallest else 1
    if threads == 1:
        return [work(0, size)]
    # More parts than threads, so that a thread takes fewer if it shares its core, often with a spinning OpenMP thread.
    parts = PARTS_PER_THREAD * threads
    bounds = [size * part // parts for part in range(parts + 1)]
    remaining = deque(range(parts))
    results: dict[int, PartResult] = {}

    def take_parts() -> None:
        while remaining:
            try:
                part = remaining.popleft()
            except IndexError:  # another thread took the last part
                return
            results[part] = work(bounds[part], bounds[part + 1])

    others = [_executor().submit(take_parts) for _ in range(threads - 1)]
    take_parts()
    for other in others:
        other.result()
    return [results[part] for part in range(parts)]


def _executor() -> Executor:
    global _pool
    with _lock:
        if _pool is None:
            # The executor starts its threads on demand.
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="bucketrank")
        return _pool


def _forget_threads() -> None:
    """Replace executor and lock in a forked child, where the threads are gone and the lock may have been held."""
    global _pool, _lock
    _pool, _lock = None, Lock()


def call_kernel(kernel: Callable[..., Any], *arguments: Any) -> Any:
    """Call a compiled ``kernel``, and raise the exception of a signal handler, such as KeyboardInterrupt, unchanged.

    numba converts arguments and results in C code that calls Python functions. If a signal handler raises in one of
    them, the conversion continues, and Python turns the exception into the cause of a SystemError, "returned a result
    with an exception set".
    """
    try:
        return kernel(*arguments)
    except SystemError as error:
        cause = _first_cause(error)
    raise cause  # outside the except block, so that the SystemError does not become its context


def _first_cause(error: BaseException) -> BaseException:
    """Follow the causes of ``error`` to the first exception other than SystemError."""
    cause: BaseException | None = error
    while isinstance(cause, SystemError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


if hasattr(os, "register_at_fork"):  # missing on Windows
    os.register_at_fork(after_in_child=_forget_threads)
