"""The ranking losses as modules, which hold the settings and return one scalar, like the losses of ``torch.nn``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from bucketrank.choices import ALRPMethod, Method, Reduction
from bucketrank.losses.dr import check_dr_settings, dr_loss
from bucketrank.losses.functional import ALRP_METHODS, alrp_loss, ap_loss, check_settings, rank_sort_loss


class APLoss(nn.Module):
    """:func:`~bucketrank.ap_loss` with its settings. Calls may give the ``sizes`` of several rankings."""

    def __init__(
        self,
        *,
        delta: float = 1.0,
        method: Method = "exact",
        interpolate: bool = False,
        reduction: Reduction = "mean",
        max_positives: int | None = None,
    ) -> None:
        super().__init__()
        check_settings("APLoss", delta, method, reduction=reduction, max_positives=max_positives)
        self.delta, self.method, self.interpolate = delta, method, interpolate
        self.reduction, self.max_positives = reduction, max_positives

    def forward(self, logits: Tensor, targets: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        return ap_loss(
            logits,
            targets,
            delta=self.delta,
            method=self.method,
            interpolate=self.interpolate,
            sizes=sizes,
            reduction=self.reduction,
            max_positives=self.max_positives,
        )

    def extra_repr(self) -> str:
        return f"delta={self.delta}, method={self.method!r}, interpolate={self.interpolate}{_batch_repr(self)}"


class RankSortLoss(nn.Module):
    """The sum of the two terms of :func:`~bucketrank.rank_sort_loss`, with its settings. Calls may give ``sizes``."""

    def __init__(
        self,
        *,
        delta: float = 0.5,
        method: Method = "exact",
        reduction: Reduction = "mean",
        max_positives: int | None = None,
    ) -> None:
        super().__init__()
        check_settings("RankSortLoss", delta, method, reduction=reduction, max_positives=max_positives)
        self.delta, self.method = delta, method
        self.reduction, self.max_positives = reduction, max_positives

    def forward(self, logits: Tensor, targets: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        ranking, sorting = rank_sort_loss(
            logits,
            targets,
            delta=self.delta,
            method=self.method,
            sizes=sizes,
            reduction=self.reduction,
            max_positives=self.max_positives,
        )
        return ranking + sorting

    def extra_repr(self) -> str:
        return f"delta={self.delta}, method={self.method!r}{_batch_repr(self)}"


class ALRPLoss(nn.Module):
    """The sum of the two terms of :func:`~bucketrank.alrp_loss`, with its settings. Calls may give ``sizes``."""

    def __init__(
        self,
        *,
        delta: float = 1.0,
        method: ALRPMethod = "exact",
        reduction: Reduction = "mean",
        max_positives: int | None = None,
    ) -> None:
        super().__init__()
        check_settings("ALRPLoss", delta, method, ALRP_METHODS, reduction=reduction, max_positives=max_positives)
        self.delta, self.method = delta, method
        self.reduction, self.max_positives = reduction, max_positives

    def forward(
        self, logits: Tensor, targets: Tensor, localisation: Tensor, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        classification, boxes = alrp_loss(
            logits,
            targets,
            localisation,
            delta=self.delta,
            method=self.method,
            sizes=sizes,
            reduction=self.reduction,
            max_positives=self.max_positives,
        )
        return classification + boxes

    def extra_repr(self) -> str:
        return f"delta={self.delta}, method={self.method!r}{_batch_repr(self)}"


def _batch_repr(module: APLoss | RankSortLoss | ALRPLoss) -> str:
    """Return the settings that differ from their defaults, as a continuation of ``extra_repr``."""
    reduction = "" if module.reduction == "mean" else f", reduction={module.reduction!r}"
    return reduction + ("" if module.max_positives is None else f", max_positives={module.max_positives}")


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
