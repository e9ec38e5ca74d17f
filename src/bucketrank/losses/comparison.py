"""What a ranking loss asks of the logits: sums of H over positives and over negatives.

The losses (``terms.py``) are written once, in these few questions; each method answers them in its own way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# A tensor; in the fused backend a numpy array, whose small operations cost a fifth of torch's.
Array = Any


def precise(tensor: Tensor) -> Tensor:
    """``tensor`` in the widest float its device has: sums over millions of logits need it."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _all_finite(logits: Tensor, targets: Tensor) -> bool:
    """Whether all that takes part is finite: by the extremes, which pass NaN on, as that takes fewer passes."""
    if logits.numel() == 0:
        return True
    low, high = logits.masked_fill(targets < 0, 0).aminmax()
    return bool((low > -torch.inf) & (high < torch.inf) & (targets.amax() < torch.inf))


class Comparison(ABC):
    """The logits of one call, compared with its positives.

    ``index`` holds the flat positions of the positives, lowest logit first; found if not given. Every vector over
    positives, in and out, is in that order, in the precision of :func:`precise`, and an array of the namespace
    ``xp``.
    """

    xp: Any = torch
    # Whether all that takes part is a finite number: logits not ignored, targets of positives. Else there is nothing
    # to ask.
    finite: bool
    scores: Array

    def __init__(self, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None) -> None:
        self.logits = logits
        self.targets = targets
        self.delta = delta
        if index is None:
            index = (targets > 0).nonzero().squeeze(1)
            index = index[logits[index].argsort(stable=True)]
            self.finite = _all_finite(logits, targets)
        self._index = index
        self.scores = precise(logits[index])

    @property
    def index(self) -> Tensor:
        """The flat positions of the positives."""
        return self._index

    @cached_property
    def labels(self) -> Array:
        """The targets of the positives."""
        return self.vector(self.targets[self.index])

    def resolves(self) -> bool:
        """Whether this method has the digits for logits this large and a delta this small."""
        return True

    def vector(self, values: Tensor) -> Array:
        """``values`` as the arrays here are."""
        return precise(values)

    def scalar(self, value: Array) -> Tensor:
        """``value`` as the loss returns it."""
        tensor: Tensor = value
        return tensor.to(self.logits.dtype)

    def running_minimum(self, values: Array) -> Array:
        """The least value so far, from the lowest logit up."""
        return values.cummin(0).values

    @abstractmethod
    def false_positives(self) -> Array:
        """sum over negatives j of H(s_j - s_i), for each positive i."""

    @abstractmethod
    def above(self, values: Array) -> Array:
        """sum over positives j of H(s_j - s_i) values_j, j = i included; ``values`` is (P, K)."""

    @abstractmethod
    def above_worse(self, values: Array) -> Array:
        """The same over only the positives j with a lower label than i; ``values`` is (P, 2)."""

    @abstractmethod
    def below_better(self, values: Array) -> Array:
        """sum over the positives k with a higher label than i of H(s_i - s_k) values_k; ``values`` is (P,)."""

    @abstractmethod
    def spread(self, weights: Array, own: Array) -> Tensor:
        """sum over positives i of weights_i H(s_j - s_i) at negative j; ``own`` at the positives; 0 where ignored."""
