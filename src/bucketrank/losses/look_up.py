"""A table that finds the bucket of each logit, the number of edges at or below it, in a few torch operations.

The range of the edges is divided into equal cells. A number's cell gives the edges below the cell; a binary search
among the edges of one cell gives the rest. All logits take the same few steps together, while a binary search among
all edges would read distant memory for each logit.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Cells per edge: enough that the binary search mostly takes three or four steps.
CELLS_PER_EDGE = 2
# float32, the widest float of some devices, holds every integer only up to this number.
MOST_CELLS = 1 << 24


class LookUp:
    """Computes ``torch.searchsorted(edges, numbers, right=True)`` in int32; no number may be NaN."""

    def __init__(self, edges: Tensor) -> None:
        self.last = min(CELLS_PER_EDGE * edges.numel(), MOST_CELLS) - 1
        self.low = edges[0]
        # The clamp keeps it positive and finite, even where all edges are equal or their range overflows.
        limits = torch.finfo(edges.dtype)
        self.cells_per_unit = ((self.last + 1) / (edges[-1] - edges[0])).clamp(limits.tiny, limits.max)
        members = torch.bincount(self._cell(edges), minlength=self.last + 1)
        self.before = (members.cumsum(0) - members).int()
        self.steps = int(members.max()).bit_length()
        # The search may read past the last edge: ``nan <= x`` is false for every x.
        self.edges = torch.cat([edges, edges.new_full((1 << self.steps,), torch.nan)])

    def __call__(self, numbers: Tensor) -> Tensor:
        bucket = self.before.index_select(0, self._cell(numbers))
        for step in reversed(range(self.steps)):
            half = 1 << step
            bucket.add_(self.edges[half - 1 :].index_select(0, bucket) <= numbers, alpha=half)
        return bucket

    def _cell(self, numbers: Tensor) -> Tensor:
        """Return the cell of each number: rounding keeps the order of the numbers, and clamping gives a valid cell."""
        return numbers.sub(self.low).mul_(self.cells_per_unit).clamp_(0, self.last).int()
