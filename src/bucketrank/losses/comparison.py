"""The sums of H over positives and negatives from which every ranking loss is made.

The losses (``terms.py``) are written once, with these few sums; each method computes them in its own way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

# A tensor; in the fused backend a numpy array, whose small operations cost a fifth of torch's.
Array = Any

# A delta below this fraction of the largest positive logit leaves float64 too few digits for the edges s +- delta.
FINEST_DELTA = 1e-9
# Sums and quotients of numbers inside the range of a float type, narrowed by this factor, do not overflow.
HEADROOM = 2.0**60


# Types of devices whose values Python reads without waiting, and which have no cost of launches.
HOSTS: Container[str] = ("cpu",)


def on_host(tensor: Tensor) -> bool:
    """Whether reading a value of ``tensor`` costs nothing. Elsewhere the host would wait for the device."""
    return tensor.device.type in HOSTS


def precise(tensor: Tensor) -> Tensor:
    """Convert ``tensor`` to the widest float of its device, which sums over millions of logits need."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def can_place_edges(largest: float, delta: float, dtype: torch.dtype = torch.float64) -> bool:
    """Whether ``dtype`` has the digits and the range for the edges ``s +- delta`` of scores up to ``largest``."""
    limits = torch.finfo(dtype)
    if not max(largest, delta) <= limits.max / HEADROOM:
        return False
    return delta == 0 or delta >= max(FINEST_DELTA * largest, limits.tiny * HEADROOM)


class Comparison(ABC):
    """The logits of one call, compared with its positives.

    A method is a subclass. It is created with the flat logits and targets, delta, and optionally ``index``. ``index``
    holds the flat positions of the positives, lowest logit first; it is computed if it is None. Every vector over
    positives, as argument or result, has that order, the precision of :func:`precise`, and is an array of the
    namespace ``xp``.
    """

    xp: Any
    # Whether the method uses the edges of the ramps, so that a tiny delta leaves it too few digits.
    has_edges: ClassVar[bool] = False
    delta: float
    # False if the host knows that a logit that is not ignored, or the target of a positive, is not finite. Then no sum
    # is defined.
    finite: bool = True
    # On a device, where the host does not wait for the answer: 0 if all of them are finite, else NaN.
    taint: Tensor | None = None
    # The logits of the positives.
    scores: Array

    @abstractmethod
    def __init__(self, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None) -> None: ...

    @property
    @abstractmethod
    def index(self) -> Tensor:
        """The flat positions of the positives."""

    @cached_property
    @abstractmethod
    def labels(self) -> Array:
        """The targets of the positives."""

    def is_accurate(self) -> bool:
        """Whether this method has enough digits for logits this large and a delta this small."""
        return True

    @abstractmethod
    def vector(self, values: Tensor) -> Array:
        """Convert ``values`` to an array of ``xp``."""

    @abstractmethod
    def number(self, value: Tensor) -> Any:
        """Convert a tensor of one value to a factor for arrays of ``xp``."""

    @abstractmethod
    def mean(self, errors: Array) -> Tensor:
        """Return the mean over the positives as a tensor of the logits' dtype."""

    @abstractmethod
    def running_minimum(self, values: Array) -> Array:
        """Return the least of ``values`` from the lowest logit up to each positive."""

    def ranks(self) -> tuple[Array, Array]:
        """Return FP(i) and rank(i) for each positive i, which counts itself in rank(i) as H(0)."""
        false_positives = self.false_positives()
        return false_positives, self.above(self.xp.ones_like(self.scores)[:, None])[:, 0] + false_positives

    @abstractmethod
    def false_positives(self) -> Array:
        """Return FP(i), the sum over negatives j of H(s_j - s_i), for each positive i."""

    @abstractmethod
    def above(self, values: Array) -> Array:
        """Return the sum over positives j of H(s_j - s_i) values_j, j = i included; ``values`` is (P, K)."""

    @abstractmethod
    def above_worse(self, values: Array) -> Array:
        """Return the same sum over only the positives j with a lower label than i; ``values`` is (P, 2)."""

    @abstractmethod
    def below_better(self, values: Array) -> Array:
        """Return the sum over positives k with a higher label than i of H(s_i - s_k) values_k; ``values`` is (P,)."""

    @abstractmethod
    def spread(self, weights: Array, own: Array) -> Tensor:
        """Return the gradient at every logit.

        It is the sum over positives i of weights_i H(s_j - s_i) at negative j, ``own`` at the positives, 0 at ignored
        entries.
        """


class TorchComparison(Comparison):
    """Base of all methods in torch operations, which find the positives and convert arrays in the same way."""

    xp: Any = torch

    def __init__(self, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None) -> None:
        self.logits = logits
        self.targets = targets
        self.delta = delta
        if index is None:
            index = positives_by_score(logits, (targets > 0).nonzero().squeeze(1))
            self.finite, self.taint = check_finite(logits, targets)
        self._index = index
        self.scores = precise(comparable(logits[index]))

    @property
    def index(self) -> Tensor:
        return self._index

    @cached_property
    def labels(self) -> Array:
        return precise(self.targets[self.index])

    def vector(self, values: Tensor) -> Array:
        return precise(values)

    def number(self, value: Tensor) -> Any:
        return precise(value)  # stays on the device: no synchronisation

    def mean(self, errors: Array) -> Tensor:
        mean: Tensor = errors.sum() / len(errors)
        return mean.to(self.logits.dtype)

    def running_minimum(self, values: Array) -> Array:
        return values.cummin(0).values


def positives_by_score(logits: Tensor, index: Tensor) -> Tensor:
    """Return the positions ``index``, lowest logit first; equal logits keep their order."""
    return index[comparable(logits[index]).argsort(stable=True)]


def comparable(scores: Tensor) -> Tensor:
    """Replace what is not finite on a device, where the sums are computed before anybody knows that they are NaN.

    Every place that a search among finite scores finds is valid, so no index is out of range.
    """
    return scores if on_host(scores) else scores.nan_to_num()


def check_finite(logits: Tensor, targets: Tensor) -> tuple[bool, Tensor | None]:
    """Return ``finite`` and ``taint`` of a comparison."""
    if logits.numel() == 0:
        return True, None
    if on_host(logits):
        # The extremes propagate NaN, and take fewer passes than a test of each entry.
        low, high = logits.masked_fill(targets < 0, 0).aminmax()
        return bool((low > -torch.inf) & (high < torch.inf) & (targets.amax() < torch.inf)), None
    largest = torch.maximum(logits.abs(), targets).masked_fill_(targets < 0, 0).amax()
    return True, largest * 0
