"""Score-based losses that see the IoU of each positive, as functions: the rivals of the ranking losses.

They share the convention of the ranking losses. ``logits`` and ``targets`` have the same shape, any shape. A target
above 0 is the IoU label of a positive, 0 marks a negative, below 0 an entry to ignore. Each entry has its own error,
whatever the other scores are. ``reduction`` is ``"mean"``, the sum of the errors divided by the number of positives (at
least 1), as detectors use these losses; ``"sum"``; or ``"none"``, one error per entry, 0 where ignored.

Below, p is ``sigmoid(logit)``, q the target, and ``BCE(p, q) = -q log p - (1 - q) log(1 - p)``.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from bucketrank.losses.functional import check_logits
from bucketrank.losses.numbers import format_value, is_finite_number

QualityReduction = Literal["mean", "sum", "none"]


def quality_focal_loss(
    logits: Tensor, targets: Tensor, *, beta: float = 2.0, reduction: QualityReduction = "mean"
) -> Tensor:
    """Quality Focal Loss (Li et al., Generalized Focal Loss, NeurIPS 2020): ``|q - p|^beta BCE(p, q)``.

    Args:
        logits: scores before the sigmoid, of any shape.
        targets: of the same shape: the IoU label of a positive, 0 for a negative, below 0 for an entry to ignore.
        beta: exponent of the distance between score and label.
        reduction: ``"mean"`` (the sum divided by the number of positives, at least 1), ``"sum"`` or ``"none"``.

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
    """Varifocal Loss (Zhang et al., VarifocalNet, CVPR 2021).

    A positive has ``q BCE(p, q)``, a negative ``alpha p^gamma BCE(p, 0)``. The weight of a negative takes part in the
    gradient, as in the paper's formula and published code.

    Args:
        logits: scores before the sigmoid, of any shape.
        targets: of the same shape: the IoU label of a positive, 0 for a negative, below 0 for an entry to ignore.
        alpha: weight of the negatives.
        gamma: exponent of a negative's score in its weight.
        reduction: ``"mean"`` (the sum divided by the number of positives, at least 1), ``"sum"`` or ``"none"``.

    >>> # The loss is ln 2 + 0.75 * 1/4 * ln 2.
    >>> varifocal_loss(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]))
    tensor(0.8231)
    """
    logits, labels, used = _entries("varifocal_loss", logits, targets, alpha=alpha, gamma=gamma)
    weights = torch.where(labels > 0, labels, alpha * _power(logits.sigmoid(), gamma))
    return _reduce("varifocal_loss", weights * bce(logits, labels, reduction="none"), labels, used, reduction)


def soft_bce_loss(logits: Tensor, targets: Tensor, *, reduction: QualityReduction = "mean") -> Tensor:
    """Binary cross-entropy with soft targets, ``BCE(p, q)``: the loss of task-aligned one-stage detectors.

    Here ``"mean"`` divides by the sum of the positives' targets (at least 1), as these detectors do.

    Args:
        logits: scores before the sigmoid, of any shape.
        targets: of the same shape: the IoU label of a positive, 0 for a negative, below 0 for an entry to ignore.
        reduction: ``"mean"``, as described above, ``"sum"`` or ``"none"``.

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
    """Matchability-Aware Loss (Huang et al., DEIM, CVPR 2025).

    A positive has ``BCE(p, q^gamma)``, a negative ``p^gamma BCE(p, 0)``. The weight of a negative is a constant in the
    gradient, as in the published code.

    Args:
        logits: scores before the sigmoid, of any shape.
        targets: of the same shape: the IoU label of a positive, 0 for a negative, below 0 for an entry to ignore.
        gamma: exponent of the IoU label of a positive, and of a negative's score in its weight.
        reduction: ``"mean"`` (the sum divided by the number of positives, at least 1), ``"sum"`` or ``"none"``.

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
    """IoU-aware BCE (Cai et al., Align-DETR, BMVC 2024; used in LW-DETR and RF-DETR).

    A positive has ``BCE(p, t)`` with the target ``t = p^alpha q^(1 - alpha)``, a constant in the gradient; a negative
    has ``p^gamma BCE(p, 0)``.

    Args:
        logits: scores before the sigmoid, of any shape.
        targets: of the same shape: the IoU label of a positive, 0 for a negative, below 0 for an entry to ignore.
        alpha: share of the score in the target of a positive; the rest is the IoU's.
        gamma: exponent of a negative's score in its weight.
        reduction: ``"mean"`` (the sum divided by the number of positives, at least 1), ``"sum"`` or ``"none"``.

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
    """Return logits and labels of at least float32, harmless where ignored, and whether each entry is used."""
    for setting, value in exponents.items():
        check_number(name, setting, value)
    check_logits(name, logits, targets)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    used = targets >= 0
    labels = targets.detach().to(dtype)
    # NaN is not below 0: a target that is not a number stays, so that the loss shows it.
    return logits.to(dtype).masked_fill(targets < 0, 0), labels.masked_fill(targets < 0, 0), used | targets.isnan()


def _power(base: Tensor, exponent: float) -> Tensor:
    """Return the power with a finite gradient: that of an exponent below 1 is infinite at 0."""
    return base.clamp(min=torch.finfo(base.dtype).tiny) ** exponent if exponent < 1 else base**exponent


def check_number(name: str, setting: str, value: float) -> None:
    """Raise unless a setting of these losses is a finite number of at least 0."""
    if not is_finite_number(value) or value < 0:
        raise ValueError(f"{name}: expected {setting} to be a finite number of at least 0, got {format_value(value)}")


def check_reduction(name: str, reduction: str) -> None:
    """Raise unless ``reduction`` is one that these losses have."""
    if reduction not in get_args(QualityReduction):
        choices = ", ".join(get_args(QualityReduction))
        raise ValueError(f"{name}: expected reduction to be one of {choices}, got {reduction!r}")


def _reduce(name: str, errors: Tensor, labels: Tensor, used: Tensor, reduction: str) -> Tensor:
    check_reduction(name, reduction)
    errors = torch.where(used, errors, 0)
    if reduction == "none":
        return errors
    return errors.sum() if reduction == "sum" else errors.sum() / (labels > 0).sum().clamp(min=1)
