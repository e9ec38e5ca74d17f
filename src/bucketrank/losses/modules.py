"""The ranking losses as modules, which hold the settings and return one scalar, like the losses of ``torch.nn``."""

from __future__ import annotations

import math

from torch import Tensor, nn

from bucketrank.choices import ALRPMethod, Method
from bucketrank.losses.dr import check_dr_settings, dr_loss
from bucketrank.losses.functional import ALRP_METHODS, alrp_loss, ap_loss, check_settings, rank_sort_loss


class APLoss(nn.Module):
    """:func:`~bucketrank.ap_loss` with its settings."""

    def __init__(self, *, delta: float = 1.0, method: Method = "exact", interpolate: bool = False) -> None:
        super().__init__()
        check_settings("APLoss", delta, method)
        self.delta, self.method, self.interpolate = delta, method, interpolate

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return ap_loss(logits, targets, delta=self.delta, method=self.method, interpolate=self.interpolate)

    def extra_repr(self) -> str:
        return f"delta={self.delta}, method={self.method!r}, interpolate={self.interpolate}"


class RankSortLoss(nn.Module):
    """The sum of the two terms of :func:`~bucketrank.rank_sort_loss`, with its settings."""

    def __init__(self, *, delta: float = 0.5, method: Method = "exact") -> None:
        super().__init__()
        check_settings("RankSortLoss", delta, method)
        self.delta, self.method = delta, method

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        ranking, sorting = rank_sort_loss(logits, targets, delta=self.delta, method=self.method)
        return ranking + sorting

    def extra_repr(self) -> str:
        return f"delta={self.delta}, method={self.method!r}"


class ALRPLoss(nn.Module):
    """The sum of the two terms of :func:`~bucketrank.alrp_loss`, with its settings."""

    def __init__(self, *, delta: float = 1.0, method: ALRPMethod = "exact") -> None:
        super().__init__()
        check_settings("ALRPLoss", delta, method, ALRP_METHODS)
        self.delta, self.method = delta, method

    def forward(self, logits: Tensor, targets: Tensor, localisation: Tensor) -> Tensor:
        classification, boxes = alrp_loss(logits, targets, localisation, delta=self.delta, method=self.method)
        return classification + boxes

    def extra_repr(self) -> str:
        return f"delta={self.delta}, method={self.method!r}"


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
