"""Exact bucketing of CPU tensors in compiled loops: one pass over the logits forward, one backward.

One comparison holds all rankings of a call. A thread handles many small rankings at a time; large rankings are split
between threads. How a ranking is computed depends only on that ranking and the number of threads, so its numbers have
the same bits in every batch.

The forward pass stores the bucket of every negative in the memory of the future gradient, and the backward pass
overwrites it. So no bucket is computed twice, and the buckets need no memory of their own.

The loops (``kernels.py``) run on Python threads. numba's threading layers start a second OpenMP beside torch's, crash
in forked workers, or cannot be called from two Python threads at once. Python threads have none of these problems, cost
nothing while idle, and follow ``torch.set_num_threads``.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from bucketrank.losses import kernels, sorting
from bucketrank.losses.comparison import Array, Comparison, can_place_edges

PartResult = TypeVar("PartResult")

# Minimum entries per thread. A second thread starts late, often on a core where an OpenMP thread still spins.
MIN_ENTRIES = 1 << 17
# Minimum positives per thread in sums over positives, where a positive takes as long as hundreds of negatives.
MIN_POSITIVES = 1 << 13
# The fixed cost of a small ranking, in entries.
RANKING_COST = 64
PARTS_PER_THREAD = 2

_lock = Lock()
_pool: Executor | None = None


class Fused(Comparison):
    """Exact bucketing of all rankings in a call, with the same results as ``exact.py``.

    Vectors over positives concatenate the rankings. In broken rankings, they hold arbitrary finite numbers. With
    more than ``max_positives`` positives every ranking is broken.
    """

    xp: Any = np
    takes_sizes = True
    # Memory for the gradient. Until the backward pass returns it, it holds the bucket of every negative.
    gradient: Array | None = None

    def __init__(
        self,
        logits: Tensor,
        targets: Tensor,
        delta: float,
        sizes: Sequence[int] | None = None,
        max_positives: int | None = None,
    ) -> None:
        self.delta = delta
        self.logits, self.targets = logits.detach().numpy(), targets.numpy()
        positions = _positives(self.targets)
        self.shape = () if sizes is None else (len(sizes),)
        if sizes is None:
            self.starts, self.first = np.array([0, self.logits.size]), np.array([0, positions.size])
            self.sizes, self.counts = self.starts[1:], self.first[1:]  # a ranking that begins at 0 ends at its size
        else:
            self.sizes = np.array(sizes, np.int64)
            self.starts = np.concatenate([[0], self.sizes.cumsum()])
            self.first = positions.searchsorted(self.starts)
            self.counts = self.first[1:] - self.first[:-1]
        self.runs = [part[:2] for part in split_rankings(self.counts, MIN_POSITIVES)]
        self.parts = split_rankings(self.sizes, MIN_ENTRIES, RANKING_COST, within=True)
        # Build the tables of a split ranking before its parts.
        self.heads = [(*part[:2], 0, 0) for part in self.parts if part[2] == 0 and part[3] < self.sizes[part[0]]]
        self.overfull = max_positives is not None and positions.size > max_positives
        # Whether the value of each ranking is NaN.
        self.broken = (np.ones if self.overfull else np.zeros)(self.sizes.size, np.bool_)
        scores = self.logits[positions].astype(np.float64)
        self.order = self._sort_large(scores)
        self.at, self.scores = np.empty_like(positions), np.empty_like(scores)
        largest = self._each(sorting.gather_rankings, scores, positions, self.order, self.scores, self.at)
        self.accurate = can_place_edges(max(largest, default=0.0), delta)
        if self.accurate:  # otherwise the definition replaces this comparison
            size = self._edges_per_positive * self.scores.size + kernels.PADDING * self.sizes.size
            self.edges, self.owners = np.empty(size), np.empty(size, np.int64)
            self.bounds, self.before = np.empty(size, self.logits.dtype), np.empty(2 * size, np.uint32)
            self.cells_per_unit, self.buckets = np.empty(self.sizes.size), np.empty(2 * size)
            self.gradient = np.empty_like(self.logits)
            self._fill(self.gradient)

    @cached_property
    def index(self) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(self.at)

    @cached_property
    def labels(self) -> Array:
        return self.targets[self.at].astype(np.float64)

    @cached_property
    def windows(self) -> tuple[Array, Array, Array]:
        """The windows of the scores, see :func:`kernels.windows`."""
        return self._windows(self.scores)

    def positives_per_ranking(self) -> list[int]:
        counts: list[int] = self.counts.tolist()
        return counts

    def is_accurate(self) -> bool:
        return self.accurate

    def by_score(self, values: Tensor) -> Array:
        return values.double().numpy()[self.order]  # numpy has no bfloat16

    def by_position(self, values: Array) -> Tensor:
        ordered = np.empty_like(values)
        ordered[self.order] = values
        return torch.from_numpy(ordered)

    def share(self, upstream: Tensor) -> Array:
        if self.sizes.size == 1:
            return np.nan if self.broken[0] else upstream.item() / max(1, self.scores.size)
        factors = upstream.double().numpy() / np.maximum(self.counts, 1)
        return np.where(self.broken, np.nan, factors).repeat(self.counts)

    def mean(self, errors: Array) -> Tensor:
        means = np.empty(self.sizes.size, self.logits.dtype)
        call_kernel(kernels.mean_rankings, self.first, self.broken, errors, means)
        # Reshaped in numpy: autograd would keep a torch view and its node alive until the garbage collector runs.
        return torch.from_numpy(means.reshape(self.shape))

    def running_minimum(self, values: Array) -> Array:
        call_kernel(kernels.running_minima, self.first, values, minima := np.empty_like(values))
        return minima

    def sum_below(self, values: Array) -> Array:
        call_kernel(kernels.sum_rankings_below, self.first, self.scores, values, sums := np.empty_like(values))
        return sums

    def ranks(self) -> tuple[Array, Array]:
        false_positives, ranks = np.empty_like(self.scores), np.empty_like(self.scores)
        tables = self.edges, self.owners, self.buckets
        self._each(kernels.rank_rankings, self.scores, self.delta, *tables, false_positives, ranks)
        return false_positives, ranks

    def false_positives(self) -> Array:
        sums = np.empty_like(self.scores)
        self._each(kernels.count_rankings, self.delta, self.edges, self.owners, self.buckets, sums)
        return sums

    def spread(self, weights: Array, own: Array) -> Tensor:
        gradient, self.gradient = self.gradient, None
        if gradient is None:  # already returned by an earlier backward pass
            gradient = np.empty_like(self.logits)
            self._fill(gradient)
        inputs = self.starts, self.first, self.broken, self.logits, self.targets, self.delta, self.edges, self.owners
        outputs = weights, np.empty_like(self.buckets), _numbers_in(gradient), gradient
        for parts in (self.heads, self.parts):
            run_kernel(kernels.write_gradients, parts, *inputs, *outputs)
        call_kernel(kernels.write_own_gradients, self.first, self.broken, self.at, own, gradient)
        return torch.from_numpy(gradient)

    def above(self, values: Array) -> Array:
        sums = np.empty_like(values)
        self._each(kernels.sum_rankings_above, *self.windows, values, sums)
        return sums

    def above_worse(self, values: Array) -> Array:
        return self._above_worse(self.windows, self.labels, values)

    def below_better(self, values: Array) -> Array:
        # Reversing a ranking turns "below and better" into "above and worse". The kernel takes two columns; one is 0.
        turned: Any = slice(None, None, -1)
        if self.sizes.size > 1:
            turned = (self.first[:-1] + self.first[1:] - 1).repeat(self.counts) - np.arange(values.size)
        windows = self._windows(-self.scores[turned])
        columns = np.zeros((values.size, 2))
        columns[:, 0] = values[turned]
        return self._above_worse(windows, -self.labels[turned], columns)[turned, 0]

    def _above_worse(self, windows: tuple[Array, Array, Array], labels: Array, values: Array) -> Array:
        sums = np.empty_like(values)
        order = self._sort(labels)
        if self.sizes.size > 1:
            order -= self.first[:-1].repeat(self.counts)
        parts = split_rankings(self.counts, MIN_POSITIVES, within=True)
        arguments = self.first, self.broken, *windows, order, labels, values, sums
        run_kernel(kernels.sum_rankings_above_worse, parts, *arguments)
        return sums

    def _windows(self, scores: Array) -> tuple[Array, Array, Array]:
        windows = np.empty_like(scores), np.empty(scores.size, np.int64), np.empty(scores.size, np.int64)
        self._each(kernels.write_windows, scores, self.delta, *windows)
        return windows

    def _sort(self, values: Array) -> Array:
        """Return the order that sorts the values of each ranking."""
        order = self._sort_large(values)
        run_kernel(sorting.sort_rankings, self.runs, self.first, values, order)
        return order

    def _sort_large(self, values: Array) -> Array:
        """Allocate the order and fill it for the rankings that are too large for the kernel."""
        if self.sizes.size == 1 and values.size > sorting.MAX_SORTED:
            return values.argsort()
        order = np.empty(values.size, np.int64)
        if values.size > sorting.MAX_SORTED:
            for ranking in (self.counts > sorting.MAX_SORTED).nonzero()[0]:
                own = slice(self.first[ranking], self.first[ranking + 1])
                order[own] = own.start + values[own].argsort()
        return order

    @property
    def _edges_per_positive(self) -> int:
        return 1 if self.delta == 0 else 2

    def _fill(self, gradient: Array) -> None:
        """Fill the buckets, store the bucket of each negative in ``gradient``, and find the broken rankings."""
        inputs = self.starts, self.first, self.broken, self.logits, self.targets, self.scores, self.delta
        tables = self.edges, self.owners, self.bounds, self.before, self.cells_per_unit, _numbers_in(gradient)

        if len(self.parts) == 1:
            call_kernel(kernels.fill_rankings, *self.parts[0], *inputs, *tables, 0, self.buckets)
            return

        def fill(begin: int, end: int, start: int, stop: int) -> Array:
            offset, buckets = 0, self.buckets
            if start > 0:  # this part has its own buckets, which are added below
                offset = self._edges_per_positive * self.first[begin] + kernels.PADDING * begin
                buckets = np.empty(2 * (self._edges_per_positive * self.counts[begin] + kernels.PADDING))
            call_kernel(kernels.fill_rankings, begin, end, start, stop, *inputs, *tables, offset, buckets)
            return buckets

        run(fill, self.heads)
        for (begin, _, start, _), buckets in zip(self.parts, run(fill, self.parts), strict=True):
            if start > 0 and self.counts[begin] > 0 and not self.broken[begin]:
                offset = 2 * (self._edges_per_positive * self.first[begin] + kernels.PADDING * begin)
                size = 2 * (self._edges_per_positive * self.counts[begin] + 1)
                self.buckets[offset : offset + size] += buckets[:size]

    def _each(self, kernel: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``kernel`` for all rankings, on several threads if they have many positives."""
        return run_kernel(kernel, self.runs, self.first, self.broken, *arguments)


def _positives(targets: Array) -> Array:
    if targets.size < 2 * MIN_ENTRIES:
        return (targets > 0).nonzero()[0]
    return np.concatenate(in_parts(lambda start, stop: start + (targets[start:stop] > 0).nonzero()[0], targets.size))


def _numbers_in(gradient: Array) -> Array:
    """View the memory of ``gradient`` as unsigned integers, which hold bucket numbers."""
    return gradient.view(np.uint32 if gradient.itemsize == 4 else np.uint64)


def split_rankings(
    sizes: Array, smallest: int, cost: int = 0, *, within: bool = False
) -> list[tuple[int, int, int, int]]:
    """Split rankings of these sizes into parts for several threads: (first ranking, end, first member, end).

    A part is a run of whole rankings; with ``within``, large rankings are split into parts of their own, which depend
    only on the size of the ranking and the number of threads. ``cost`` is the fixed cost of a ranking, in members.
    """
    if sizes.size == 0:
        return []
    threads = torch.get_num_threads()
    everything = int(sizes[0] if sizes.size == 1 else sizes.max())
    if threads == 1 or (sizes.size == 1 and (not within or everything < 2 * smallest)):
        return [(0, sizes.size, 0, everything)]
    parts: list[tuple[int, int, int, int]] = []
    large = (sizes >= 2 * smallest).nonzero()[0].tolist() if within else []
    begin = 0
    for ranking in [*large, sizes.size]:
        if begin < ranking:
            costs = (sizes[begin:ranking] + cost).cumsum()
            count = min(int(costs[-1]) // smallest, PARTS_PER_THREAD * threads) or 1
            cuts = costs.searchsorted(costs[-1] * np.arange(1, count) / count).tolist()
            bounds = [begin, *(begin + cut for cut in cuts), ranking]
            parts += [(low, high, 0, everything) for low, high in pairwise(bounds) if low < high]
        if ranking < sizes.size:
            parts += [(ranking, ranking + 1, *bounds) for bounds in pairwise(_bounds(int(sizes[ranking]), smallest))]
        begin = ranking + 1
    return parts


def in_parts(work: Callable[[int, int], PartResult], size: int, smallest: int = MIN_ENTRIES) -> list[PartResult]:
    """Call ``work(start, stop)`` for parts of ``range(size)`` on several threads, and return the results in order."""
    return [work(0, size)] if size < 2 * smallest else run(work, list(pairwise(_bounds(size, smallest))))


def _bounds(size: int, smallest: int) -> list[int]:
    """Return the bounds of the parts of ``range(size)``, which depend only on the size and the number of threads."""
    threads = min(torch.get_num_threads(), size // smallest) if size >= 2 * smallest else 1
    # More parts than threads, so that a thread takes fewer if it shares its core, often with a spinning OpenMP thread.
    parts = 1 if threads == 1 else PARTS_PER_THREAD * threads
    return [size * part // parts for part in range(parts + 1)]


def run(work: Callable[..., PartResult], parts: Sequence[tuple[int, ...]]) -> list[PartResult]:
    """Call ``work(*part)`` for each part, on several threads, and return the results in order."""
    threads = min(torch.get_num_threads(), len(parts)) if len(parts) > 1 else 1
    if threads == 1:
        return [work(*part) for part in parts]
    remaining = deque(range(len(parts)))
    results: dict[int, PartResult] = {}

    def take_parts() -> None:
        while remaining:
            try:
                part = remaining.popleft()
            except IndexError:  # another thread took the last part
                return
            results[part] = work(*parts[part])

    others = [_executor().submit(take_parts) for _ in range(threads - 1)]
    take_parts()
    for other in others:
        other.result()
    return [results[part] for part in range(len(parts))]


def run_kernel(kernel: Callable[..., Any], parts: Sequence[tuple[int, ...]], *arguments: Any) -> list[Any]:
    """Call ``kernel(*part, *arguments)`` for each part, on several threads, and return the results in order."""
    if len(parts) == 1:  # on small inputs, every further call costs as much as a loop
        return [call_kernel(kernel, *parts[0], *arguments)]
    return run(lambda *part: call_kernel(kernel, *part, *arguments), parts)


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
