"""Calls the Triton kernels directly, and returns what the oracle returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bucketrank.losses.triton import rank_with_triton

from ..cases import localisation_errors
from ..oracle import Answer

# The names of RANKING_LOSSES for the names of the tests.
NAMES = {"ap": "ap", "interpolated_ap": "interpolated_ap", "rank_sort": "rs", "alrp": "alrp"}


class Result(NamedTuple):
    """Values per ranking, and the gradients of each term at the logits and at the localisation errors."""

    values: list[Tensor]
    gradients: list[Tensor]
    at_localisation: Tensor | None

    def answer(self, ranking: int = 0, sizes: tuple[int, ...] | None = None) -> Answer:
        """Return the answer of one ranking."""
        sizes = sizes or (self.gradients[0].numel(),)
        start = sum(sizes[:ranking])
        part = slice(start, start + sizes[ranking])
        return Answer([value[ranking] for value in self.values], [gradient[part] for gradient in self.gradients])


def compute(
    name: str,
    logits: Tensor,
    targets: Tensor,
    delta: float,
    *,
    sizes: tuple[int, ...] | None = None,
    max_positives: int | None = None,
    localisation: Tensor | None = None,
) -> Result:
    if name == "alrp" and localisation is None:
        localisation = localisation_errors(targets).to(torch.promote_types(logits.dtype, torch.float32))
    first, second, ranking = rank_with_triton(
        logits,
        targets,
        localisation,
        loss=NAMES[name],
        delta=delta,
        sizes=(logits.numel(),) if sizes is None else sizes,
        max_positives=max_positives,
    )
    one = torch.ones_like(first)
    if second is None:
        return Result([first], [ranking.backward(one, None)[0]], None)
    at_first, _ = ranking.backward(one, None)
    # An expanded gradient, as the backward pass of a mean gives it.
    at_second, at_localisation = ranking.backward(None, one[:1].expand(len(one)))
    return Result([first, second], [at_first, at_second], at_localisation)
