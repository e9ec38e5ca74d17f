"""Score-based losses with IoU targets, the rivals of the ranking losses.

They share the targets of the ranking losses, but the error of an entry does not depend on other entries.

Each loss is a function, and a module that holds its settings. Below, p is ``sigmoid(logit)``, q the target, and
``BCE(p, q) = -q log p - (1 - q) log(1 - p)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from bucketrank.losses.functional import check_choice, check_logits, check_number

QualityReduction = Literal["mean", "sum", "none"]
QUALITY_REDUCTIONS: tuple[QualityReduction, ...] = get_args(QualityReduction)


def quality_focal_loss(
    logits: Tensor, targets: Tensor, *, beta: float = 2.0, reduction: QualityReduction = "mean"
) -> Tensor:
    """Quality Focal Loss (Li et al., Generalized Focal Loss, NeurIPS 2020): ``|q - p|^beta BCE(p, q)``.

    Args:
        logits: scores before the sigmoid, of any shape.
        targets: of the same shape: the IoU label of a positive, 0 for a negative, below 0 for an ignored entry.
        beta: exponent of the distance between score and label.
        reduction: ``"mean"`` (the sum divided by the number of positives, at least 1), ``"sum"`` or ``"none"``, one
            error per entry, 0 where ignored.

    >>> # The loss is twice 1/4 * ln 2.
    >>> quality_focal_loss(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]))
    tensor(0.3466)
    """
    logits, labels, used = _entries("quality_focal_loss", logits, targets, beta=beta)
    errors = _power((labels - logits.sigmoid()).abs(), beta) * bce(logits, labels, reduction="none")
    return _reduce("quality_focal_loss", errors, labels, used, reduction)


def varifocal_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    alpha: float = 0.75,
    gamma: float = 2.0,
    reduction: QualityReduction = "mean",
) -> Tensor:
    """Varifocal Loss, ``q BCE(p, q)`` or ``alpha p^gamma BCE(p, 0)`` (Zhang et al., VarifocalNet, CVPR 2021).

    The first formula is for positives, the second for negatives. The weight of a negative takes part in the gradient,
    as in the paper and its published code: ``alpha`` times its score to the power of ``gamma``. The other arguments are
    those of :func:`~bucketrank.quality_focal_loss`.

    >>> # The loss is ln 2 + 0.75 * 1/4 * ln 2.
    >>> varifocal_loss(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]))
    tensor(0.8231)
    """
    logits, labels, used = _entries("varifocal_loss", logits, targets, alpha=alpha, gamma=gamma)
    weights = torch.where(labels > 0, labels, alpha * _power(logits.sigmoid(), gamma))
    return _reduce("varifocal_loss", weights * bce(logits, labels, reduction="none"), labels, used, reduction)


def soft_bce_loss(logits: Tensor, targets: Tensor, *, reduction: QualityReduction = "mean") -> Tensor:
    """Binary cross-entropy with soft targets, ``BCE(p, q)``, as in task-aligned one-stage detectors.

    Here ``reduction="mean"`` divides by the sum of the positives' targets (at least 1), as these detectors do.
    Otherwise the arguments are those of :func:`~bucketrank.quality_focal_loss`.

    >>> # The loss is twice ln 2, divided by 1.
    >>> soft_bce_loss(torch.tensor([0.0, 0.0]), torch.tensor([0.5, 0.0]))
    tensor(1.3863)
    """
    logits, labels, used = _entries("soft_bce_loss", logits, targets)
    errors = bce(logits, labels, reduction="none")
    if reduction == "mean":
        return torch.where(used, errors, 0).sum() / labels.sum().clamp(min=1)
    return _reduce("soft_bce_loss", errors, labels, used, reduction)


def mal_loss(logits: Tensor, targets: Tensor, *, gamma: float = 1.5, reduction: QualityReduction = "mean") -> Tensor:
    """Matchability-Aware Loss, ``BCE(p, q^gamma)`` or ``p^gamma BCE(p, 0)`` (Huang et al., DEIM, CVPR 2025).

    The first formula is for positives, the second for negatives. The weight of a negative is a constant in the
    gradient, as in the published code. Labels and scores share the exponent ``gamma``. The other arguments are those of
    :func:`~bucketrank.quality_focal_loss`.

    >>> # The loss is ln 2 + 1/4 * ln 2.
    >>> mal_loss(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]), gamma=2.0)
    tensor(0.8664)
    """
    logits, labels, used = _entries("mal_loss", logits, targets, gamma=gamma)
    weights = torch.where(labels > 0, 1, logits.detach().sigmoid() ** gamma)
    # 0 to the power of 0 is 1, but a negative's target is 0 for every gamma.
    soft = torch.where(labels > 0, labels**gamma, labels)
    errors = weights * bce(logits, soft, reduction="none")
    return _reduce("mal_loss", errors, labels, used, reduction)


def iou_aware_bce_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    alpha: float = 0.25,
    gamma: float = 2.0,
    reduction: QualityReduction = "mean",
) -> Tensor:
    """IoU-aware BCE, ``BCE(p, p^alpha q^(1 - alpha))`` or ``p^gamma BCE(p, 0)`` (Cai et al., Align-DETR, BMVC 2024).

    The first formula is for positives, whose target is a constant in the gradient; the second is for negatives. LW-DETR
    and RF-DETR use this loss. ``alpha`` is the exponent of the score in the target of a positive, ``gamma`` that of the
    score in the weight of a negative. The other arguments are those of :func:`~bucketrank.quality_focal_loss`.

    >>> # The loss is ln 2 + 1/4 * ln 2.
    >>> iou_aware_bce_loss(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]), alpha=0.0)
    tensor(0.8664)
    """
    logits, labels, used = _entries("iou_aware_bce_loss", logits, targets, alpha=alpha, gamma=gamma)
    scores = logits.sigmoid()
    positive = labels > 0
    soft = torch.where(positive, scores.detach() ** alpha * labels ** (1 - alpha), labels)
    errors = torch.where(positive, 1, _power(scores, gamma)) * bce(logits, soft, reduction="none")
    return _reduce("iou_aware_bce_loss", errors, labels, used, reduction)


def _entries(name: str, logits: Tensor, targets: Tensor, **exponents: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits and labels in at least float32, 0 where ignored, and a mask of the entries in use."""
    for setting, value in exponents.items():
        check_number(name, setting, value)
    check_logits(name, logits, targets)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    used = targets >= 0
    labels = targets.detach().to(dtype)
    # A NaN target is not below 0. It stays in use, so that the loss becomes NaN too.
    return logits.to(dtype).masked_fill(targets < 0, 0), labels.masked_fill(targets < 0, 0), used | targets.isnan()


def _power(base: Tensor, exponent: float) -> Tensor:
    """Return ``base ** exponent`` with a finite gradient at 0, also for exponents below 1."""
    return base.clamp(min=torch.finfo(base.dtype).tiny) ** exponent if exponent < 1 else base**exponent


def _reduce(name: str, errors: Tensor, labels: Tensor, used: Tensor, reduction: str) -> Tensor:
    check_choice(name, "reduction", reduction, QUALITY_REDUCTIONS)
    errors = torch.where(used, errors, 0)
    if reduction == "none":
        return errors
    return errors.sum() if reduction == "sum" else errors.sum() / (labels > 0).sum().clamp(min=1)


class _QualityLossModule(nn.Module):
    """Base class of the score-based losses, which checks and holds their settings."""

    function: ClassVar[Callable[..., Tensor]]

    def __init__(self, reduction: QualityReduction, **numbers: float) -> None:
        super().__init__()
        for name, value in numbers.items():
            check_number(type(self).__name__, name, value)
        check_choice(type(self).__name__, "reduction", reduction, QUALITY_REDUCTIONS)
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
