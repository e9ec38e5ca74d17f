"""The ranking losses as modules, which hold the settings and return a scalar like the losses of ``torch.nn``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from bucketrank.losses.dr import check_dr_settings, dr_loss
from bucketrank.losses.functional import ALRP_METHODS, METHODS, alrp_loss, ap_loss, check_settings, rank_sort_loss
from bucketrank.settings.choices import DEFAULT_DELTAS, ALRPMethod, Method, Reduction


class _RankingLossModule(nn.Module):
    """Base class of the ranking losses, which checks and holds the settings that they share."""

    methods: ClassVar[tuple[str, ...]] = METHODS

    def __init__(self, delta: float, method: str, reduction: Reduction, max_positives: int | None) -> None:
        super().__init__()
        name = type(self).__name__
        check_settings(name, delta, method, self.methods, reduction=reduction, max_positives=max_positives)
        self.delta, self.method, self.reduction, self.max_positives = delta, method, reduction, max_positives

    def keywords(self, sizes: Sequence[int] | None) -> dict[str, Any]:
        """Return the keyword arguments for the function behind the module."""
        shared = {"delta": self.delta, "method": self.method, "sizes": sizes, "reduction": self.reduction}
        return {**shared, "max_positives": self.max_positives}

    def extra_repr(self) -> str:
        text = f"delta={self.delta}, method={self.method!r}"
        text += "" if self.reduction == "mean" else f", reduction={self.reduction!r}"
        return text + ("" if self.max_positives is None else f", max_positives={self.max_positives}")


class APLoss(_RankingLossModule):
    """:func:`~bucketrank.ap_loss` with its settings. Calls may pass ``sizes``."""

    def __init__(
        self,
        *,
        delta: float = DEFAULT_DELTAS["ap"],
        method: Method = "exact",
        interpolate: bool = False,
        reduction: Reduction = "mean",
        max_positives: int | None = None,
    ) -> None:
        super().__init__(delta, method, reduction, max_positives)
        self.interpolate = interpolate

    def forward(self, logits: Tensor, targets: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        return ap_loss(logits, targets, interpolate=self.interpolate, **self.keywords(sizes))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, interpolate={self.interpolate}"


class RankSortLoss(_RankingLossModule):
    """The sum of both terms of :func:`~bucketrank.rank_sort_loss` with its settings. Calls may pass ``sizes``."""

    def __init__(
        self,
        *,
        delta: float = DEFAULT_DELTAS["rs"],
        method: Method = "exact",
        reduction: Reduction = "mean",
        max_positives: int | None = None,
    ) -> None:
        super().__init__(delta, method, reduction, max_positives)

    def forward(self, logits: Tensor, targets: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        ranking, sorting = rank_sort_loss(logits, targets, **self.keywords(sizes))
        return ranking + sorting


class ALRPLoss(_RankingLossModule):
    """The sum of both terms of :func:`~bucketrank.alrp_loss` with its settings. Calls may pass ``sizes``."""

    methods: ClassVar[tuple[str, ...]] = ALRP_METHODS

    def __init__(
        self,
        *,
        delta: float = DEFAULT_DELTAS["alrp"],
        method: ALRPMethod = "exact",
        reduction: Reduction = "mean",
        max_positives: int | None = None,
    ) -> None:
        super().__init__(delta, method, reduction, max_positives)

    def forward(
        self, logits: Tensor, targets: Tensor, localisation: Tensor, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        classification, boxes = alrp_loss(logits, targets, localisation, **self.keywords(sizes))
        return classification + boxes


class DRLoss(nn.Module):
    """:func:`~bucketrank.dr_loss` with its settings."""

    def __init__(
        self,
        *,
        margin: float = 0.5,
        positive_temperature: float = 1.0,
        negative_temperature: float = 0.1 / math.log(3.5),
        smoothing: float = 6.0,
        weight: float = 4.0,
    ) -> None:
        super().__init__()
        self.settings = {
            "margin": margin,
            "positive_temperature": positive_temperature,
            "negative_temperature": negative_temperature,
            "smoothing": smoothing,
            "weight": weight,
        }
        check_dr_settings("DRLoss", **self.settings)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return dr_loss(logits, targets, **self.settings)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in self.settings.items())
