"""A few threads of our own for kernels that release the GIL.

numba's own threading layers start OpenMP beside torch's, die in forked workers, or cannot be called from two Python
threads at once. Plain Python threads do none of that, cost nothing while idle, and follow ``torch.set_num_threads``.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

import torch

Result = TypeVar("Result")

# A second thread wakes late, often on a core where a thread of OpenMP still spins: for fewer it does not pay.
SMALLEST_PART = 1 << 17

PARTS_PER_THREAD = 2

_lock = Lock()
_pool: Executor | None = None


def in_parts(work: Callable[[int, int], Result], size: int, smallest: int = SMALLEST_PART) -> list[Result]:
    """``work(start, stop)`` over ``range(size)`` cut into parts, on several threads; the results in order of the parts.

    How it is cut depends on the number of threads alone, so that sums over the parts come out the same every time.
    """
    threads = min(torch.get_num_threads(), size // smallest)
    if threads <= 1:
        return [work(0, size)]
    # More parts than threads: whoever shares its core, often with a spinning thread of OpenMP, does fewer of them.
    parts = PARTS_PER_THREAD * threads
    bounds = [size * part // parts for part in range(parts + 1)]
    left = deque(range(parts))
    results: dict[int, Result] = {}

    def take_parts() -> None:
        while left:
            try:
                part = left.popleft()
            except IndexError:  # another thread was quicker
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
            # Threads are started only as they are needed.
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="bucketrank")
        return _pool


def _forget_threads() -> None:
    """Threads do not live on in a forked child, and the lock may have been held."""
    global _pool, _lock
    _pool, _lock = None, Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_forget_threads)
