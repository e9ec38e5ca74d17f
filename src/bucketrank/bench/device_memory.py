"""Peak memory of a call by the statistics of torch's allocator, on devices that have them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bucketrank.bench.device_clock import EVENT_DEVICES


def has_allocator_statistics(device: str) -> bool:
    """Return whether :func:`peak_allocated` works on the device."""
    return torch.device(device).type in EVENT_DEVICES


def peak_allocated(call: Callable[[], object], device: str) -> int:
    """Return the largest number of bytes that were allocated during the call, beyond those allocated before it.

    Memory outside of torch's allocator, such as that of the libraries, does not count.
    """
    module = getattr(torch, torch.device(device).type)
    module.synchronize()
    module.reset_peak_memory_stats()
    before: int = module.memory_allocated()
    call()
    module.synchronize()
    return int(module.max_memory_allocated()) - before
