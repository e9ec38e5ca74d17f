"""The losses of ``quality.py`` as modules, which hold their settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from bucketrank.losses.quality import (
    QualityReduction,
    check_number,
    check_reduction,
    iou_aware_bce_loss,
    mal_loss,
    quality_focal_loss,
    soft_bce_loss,
    varifocal_loss,
)


class _QualityLossModule(nn.Module):
    """Base of the modules: holds and checks the settings."""

    function: ClassVar[Callable[..., Tensor]]

    def __init__(self, reduction: QualityReduction, **numbers: float) -> None:
        super().__init__()
        for name, value in numbers.items():
            check_number(type(self).__name__, name, value)
        check_reduction(type(self).__name__, reduction)
        self.reduction, self.numbers = reduction, numbers

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return type(self).function(logits, targets, reduction=self.reduction, **self.numbers)

    def extra_repr(self) -> str:
        return ", ".join(
            [*(f"{name}={value}" for name, value in self.numbers.items()), f"reduction={self.reduction!r}"]
        )


class QualityFocalLoss(_QualityLossModule):
    """:func:`~bucketrank.quality_focal_loss` with its settings."""

    function = staticmethod(quality_focal_loss)

    def __init__(self, *, beta: float = 2.0, reduction: QualityReduction = "mean") -> None:
        super().__init__(reduction, beta=beta)


class VarifocalLoss(_QualityLossModule):
    """:func:`~bucketrank.varifocal_loss` with its settings."""

    function = staticmethod(varifocal_loss)

    def __init__(self, *, alpha: float = 0.75, gamma: float = 2.0, reduction: QualityReduction = "mean") -> None:
        super().__init__(reduction, alpha=alpha, gamma=gamma)


class SoftBCELoss(_QualityLossModule):
    """:func:`~bucketrank.soft_bce_loss` with its settings."""

    function = staticmethod(soft_bce_loss)

    def __init__(self, *, reduction: QualityReduction = "mean") -> None:
        super().__init__(reduction)


class MALLoss(_QualityLossModule):
    """:func:`~bucketrank.mal_loss` with its settings."""

    function = staticmethod(mal_loss)

    def __init__(self, *, gamma: float = 1.5, reduction: QualityReduction = "mean") -> None:
        super().__init__(reduction, gamma=gamma)


class IoUAwareBCELoss(_QualityLossModule):
    """:func:`~bucketrank.iou_aware_bce_loss` with its settings."""

    function = staticmethod(iou_aware_bce_loss)

    def __init__(self, *, alpha: float = 0.25, gamma: float = 2.0, reduction: QualityReduction = "mean") -> None:
        super().__init__(reduction, alpha=alpha, gamma=gamma)
