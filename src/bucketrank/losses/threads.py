"""Python threads for kernels that release the GIL.

numba's threading layers start a second OpenMP beside torch's, crash in forked workers, or cannot be called from two
Python threads at once. Plain Python threads have none of these problems, cost nothing while idle, and follow
``torch.set_num_threads``.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

import torch

PartResult = TypeVar("PartResult")

# A second thread starts late, often on a core where a thread of OpenMP still spins: it does not pay for fewer entries.
SMALLEST_PART = 1 << 17

PARTS_PER_THREAD = 2

_lock = Lock()
_pool: Executor | None = None


def in_parts(work: Callable[[int, int], PartResult], size: int, smallest: int = SMALLEST_PART) -> list[PartResult]:
    """Call ``work(start, stop)`` on several threads for parts of ``range(size)``; return the results in that order.

    The parts depend only on the size and the number of threads, so that sums over them are the same every time.
    """
    threads = min(torch.get_num_threads(), size // smallest) if size >= 2 * smallest else 1
    if threads == 1:
        return [work(0, size)]
    # More parts than threads: a thread that shares its core, often with a spinning thread of OpenMP, takes fewer.
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
            # The executor starts threads only when they are needed.
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="bucketrank")
        return _pool


def _forget_threads() -> None:
    """Replace the executor and the lock in a forked child: its threads are gone, and the lock may have been held."""
    global _pool, _lock
    _pool, _lock = None, Lock()


if hasattr(os, "register_at_fork"):  # missing on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget_threads)
