"""One piece of zeroed memory, divided into the arrays of one call: one allocation and one launch instead of many."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Bytes: Triton loads aligned pointers in wider pieces.
ALIGNMENT = 16


def allocate(sizes: Iterable[tuple[int, torch.dtype]], device: torch.device) -> list[Tensor]:
    """Return one array of zeros for each count and dtype in ``sizes``; all share one piece of memory."""
    total = 0
    parts: list[tuple[int, int, torch.dtype]] = []
    for count, dtype in sizes:
        parts.append((total // dtype.itemsize, count, dtype))
        total += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    memory = torch.zeros(total, dtype=torch.uint8, device=device)
    # One view per dtype, then slices: each view costs the host a microsecond.
    views = {dtype: memory.view(dtype) for dtype in {dtype for _, _, dtype in parts}}
    return [views[dtype][start : start + count] for start, count, dtype in parts]
