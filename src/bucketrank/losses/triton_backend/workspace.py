"""One piece of zeroed memory, divided into the arrays of one call: one allocation and one launch instead of many."""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes: Triton loads aligned pointers in wider pieces.
ALIGNMENT = 16


class Workspace:
    """Collects the sizes of arrays, then creates all of them as views of one tensor of zeros."""

    def __init__(self) -> None:
        self._bytes = 0
        self._arrays: list[tuple[int, int, torch.dtype]] = []

    def add(self, count: int, dtype: torch.dtype) -> int:
        """Reserve ``count`` numbers of ``dtype``, and return the position of their array in :meth:`create`."""
        length = count * dtype.itemsize
        self._arrays.append((self._bytes, length, dtype))
        self._bytes += -(-length // ALIGNMENT) * ALIGNMENT
        return len(self._arrays) - 1

    def create(self, device: torch.device) -> list[Tensor]:
        """Return the arrays, all zero."""
        memory = torch.zeros(self._bytes, dtype=torch.uint8, device=device)
        return [memory[start : start + length].view(dtype) for start, length, dtype in self._arrays]
