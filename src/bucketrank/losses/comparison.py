"""Sums of the smoothed step H over positives and negatives, from which every ranking loss is computed.

The losses (``terms.py``) are written once in terms of these sums. Each method is a subclass that computes the sums in
its own way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

# A tensor or, in the fused backend, a numpy array: small numpy operations are five times faster.
Array = Any

# A delta below this fraction of the largest positive logit leaves float64 too few digits for the edges s +- delta.
FINEST_DELTA = 1e-9
# Sums and quotients of numbers inside the range of a float type, narrowed by this factor, do not overflow.
HEADROOM = 2.0**60
# Scales subnormal numbers to normal ones. Large differences may overflow, but then H is 0 or 1.
MAGNIFICATION = 2.0**100
# Device types without launch overhead, whose values Python reads without a device sync.
HOSTS: Container[str] = ("cpu",)


def on_host(tensor: Tensor) -> bool:
    """Return whether a value of ``tensor`` can be read without a device sync."""
    return tensor.device.type in HOSTS


def precise(tensor: Tensor) -> Tensor:
    """Convert ``tensor`` to the widest float type of its device, which sums over millions of logits need."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def can_place_edges(largest: float, delta: float, dtype: torch.dtype = torch.float64) -> bool:
    """Return whether ``dtype`` has the digits and the range for edges ``s +- delta`` of scores up to ``largest``."""
    limits = torch.finfo(dtype)
    if not max(largest, delta) <= limits.max / HEADROOM:
        return False
    return delta == 0 or delta >= max(FINEST_DELTA * largest, limits.tiny * HEADROOM)


def step_(x: Tensor, delta: float) -> Tensor:
    """Overwrite ``x`` with H(x), which rises linearly from 0 at -delta to 1 at delta; at delta 0, [x >= 0] (Eq. 2)."""
    if delta == 0:
        return x.ge_(0)
    width, tiny = 2 * delta, torch.finfo(x.dtype).tiny
    if width < tiny:  # too few digits in this dtype: a tie would be 0 / 0
        x, width = x.mul_(MAGNIFICATION), max(width * MAGNIFICATION, tiny)
    return x.div_(width).add_(0.5).clamp_(0, 1)


def step_at_tie(delta: float) -> float:
    """Return H(0), which an entry adds to its own rank."""
    return 1.0 if delta == 0 else 0.5


class Comparison(ABC):
    """Comparisons of the logits with their positives, for one ranking or all rankings of a call.

    A method is a subclass, created with the flat logits and targets and delta. Every vector over positives, as argument
    or result, has the order of ``index`` and the precision of :func:`precise`, and is an array of the namespace ``xp``.
    """

    xp: Any
    # Whether the method uses the ends of the ramps, for which a tiny delta leaves too few digits.
    has_edges: ClassVar[bool] = False
    # Whether one comparison holds all rankings of a call.
    takes_sizes: ClassVar[bool] = False
    delta: float
    # False if a logit that is not ignored, or the target of a positive, is known to be NaN or infinite. Then no sum is
    # defined.
    finite: bool = True
    # The same on a device, without a device sync: 0 if all of them are finite, otherwise NaN.
    taint: Tensor | None = None
    # The flat positions of the positives, sorted by ascending logit, and their logits.
    index: Tensor
    scores: Array

    @abstractmethod
    def __init__(self, logits: Tensor, targets: Tensor, delta: float) -> None: ...

    @cached_property
    @abstractmethod
    def labels(self) -> Array:
        """The targets of the positives."""

    def positives_per_ranking(self) -> list[int]:
        """Count the positives of each ranking; a comparison of one ranking has one count."""
        return [len(self.scores)]

    def is_accurate(self) -> bool:
        """Return whether this method has enough digits for these logits and this delta."""
        return True

    @abstractmethod
    def by_score(self, values: Tensor) -> Array:
        """Convert ``values`` to a vector over positives, from the order of ``logits[targets > 0]``."""

    @abstractmethod
    def by_position(self, values: Array) -> Tensor:
        """Convert a vector over positives to a tensor in the order of ``logits[targets > 0]``."""

    @abstractmethod
    def share(self, upstream: Tensor) -> Array:
        """Convert the gradient at the mean error of a ranking to the gradient at each positive's error."""

    @abstractmethod
    def mean(self, errors: Array) -> Tensor:
        """Return the mean over the positives of each ranking, in the dtype of the logits."""

    @abstractmethod
    def running_minimum(self, values: Array) -> Array:
        """Return the minimum of ``values`` from the lowest logit up to each positive."""

    @abstractmethod
    def sum_below(self, values: Array) -> Array:
        """Return the sum of ``values`` over the positives j with s_j <= s_i, for each positive i."""

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
        """Return the sum in :meth:`above` restricted to positives j with a lower label than i; ``values`` is (P, 2)."""

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
    """Base class of the methods in torch operations.

    ``index`` is computed unless the caller already knows it.
    """

    xp: Any = torch

    def __init__(self, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None) -> None:
        self.logits = logits
        self.targets = targets
        self.delta = delta
        if index is None:
            index = positives_by_score(logits, (targets > 0).nonzero().squeeze(1))
            self.finite, self.taint = check_finite(logits, targets)
        self.index = index
        self.scores = precise(comparable(logits[index]))

    @cached_property
    def labels(self) -> Array:
        return precise(self.targets[self.index])

    def by_score(self, values: Tensor) -> Array:
        return precise(values[self.index.argsort().argsort()])

    def by_position(self, values: Array) -> Tensor:
        ordered: Tensor = values[self.index.argsort()]
        return ordered

    def share(self, upstream: Tensor) -> Array:
        return precise(upstream) / len(self.scores)  # stays on the device: no sync

    def mean(self, errors: Array) -> Tensor:
        mean: Tensor = errors.sum() / len(errors)
        return mean.to(self.logits.dtype)

    def running_minimum(self, values: Array) -> Array:
        return values.cummin(0).values

    def sum_below(self, values: Array) -> Array:
        return values.cumsum(0)[torch.searchsorted(self.scores, self.scores, side="right") - 1]


def positives_by_score(logits: Tensor, index: Tensor) -> Tensor:
    """Sort the positions ``index`` by ascending logit; the sort is stable."""
    return index[comparable(logits[index]).argsort(stable=True)]


def comparable(scores: Tensor) -> Tensor:
    """Replace NaN and Inf on a device, where the sums are computed before we know whether the scores are finite.

    A search among finite scores always finds a valid position, so no index is out of range.
    """
    return scores if on_host(scores) else scores.nan_to_num()


def check_finite(logits: Tensor, targets: Tensor) -> tuple[bool, Tensor | None]:
    """Return ``finite`` and ``taint`` of a comparison."""
    if logits.numel() == 0:
        return True, None
    if on_host(logits):
        # The extremes propagate NaN, and take fewer passes than testing each entry.
        low, high = logits.masked_fill(targets < 0, 0).aminmax()
        return bool((low > -torch.inf) & (high < torch.inf) & (targets.amax() < torch.inf)), None
    largest = torch.maximum(logits.abs(), targets).masked_fill_(targets < 0, 0).amax()
    return True, largest * 0
