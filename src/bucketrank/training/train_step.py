"""One training step, the same for runs, the demo, studies and benchmarks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


class SummedTerms(NamedTuple):
    """The loss terms of a batch by name, and their sum, which is trained."""

    total: Tensor
    terms: dict[str, Tensor]


def sum_terms(model: nn.Module, batch: Batch) -> SummedTerms:
    """Run the forward pass of a detector in training mode."""
    terms: dict[str, Tensor] = model(*batch)
    return SummedTerms(torch.stack(list(terms.values())).sum(), terms)


def train_step(
    model: nn.Module, batch: Batch, optimiser: torch.optim.Optimizer, *, clip: float | None = None
) -> SummedTerms:
    """Zero the gradients, run forward and backward, clip the gradient norm to ``clip``, and step."""
    optimiser.zero_grad()
    summed = sum_terms(model, batch)
    summed.total.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimiser.step()
    return summed
