"""How many of many sorted edges lie at or below a number, in a few torch operations: the bucket of a logit.

Equal cells over the range of the edges say where to begin; halving goes on among the edges of the fullest cell. All
logits take the same steps side by side, where a binary search among all edges would jump about memory for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Cells for each edge: enough that halving mostly ends after three or four steps.
CELLS_PER_EDGE = 2
# More than that float32, the widest float of some devices, cannot number one by one.
MOST_CELLS = 1 << 24


class LookUp:
    """``look_up(numbers)`` is ``torch.searchsorted(edges, numbers, right=True)``, in int32; no number may be NaN."""

    def __init__(self, edges: Tensor) -> None:
        self.last = min(CELLS_PER_EDGE * edges.numel(), MOST_CELLS) - 1
        self.low = edges[0]
        # Some positive, finite number even where the edges are equal, or the range is infinite.
        limits = torch.finfo(edges.dtype)
        self.cells_per_unit = ((self.last + 1) / (edges[-1] - edges[0])).clamp(limits.tiny, limits.max)
        members = torch.bincount(self._cell(edges), minlength=self.last + 1)
        self.before = (members.cumsum(0) - members).int()
        self.steps = int(members.max()).bit_length()
        # Halving may look past the end: NaN is at or below nothing.
        self.edges = torch.cat([edges, edges.new_full((1 << self.steps,), torch.nan)])

    def __call__(self, numbers: Tensor) -> Tensor:
        bucket = self.before.index_select(0, self._cell(numbers))
        for step in reversed(range(self.steps)):
            half = 1 << step
            bucket.add_(self.edges[half - 1 :].index_select(0, bucket) <= numbers, alpha=half)
        return bucket

    def _cell(self, numbers: Tensor) -> Tensor:
        """The cell that holds each number: never decreasing, and always a cell, however the product is rounded."""
        return numbers.sub(self.low).mul_(self.cells_per_unit).clamp_(0, self.last).int()
