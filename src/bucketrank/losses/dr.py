"""DR loss (Qian et al., CVPR 2020), which ranks distributions. A differentiable baseline, one pass over the logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bucketrank.losses.functional import check_logits
from bucketrank.losses.numbers import format_value, is_finite_number


def dr_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    margin: float = 0.5,
    positive_temperature: float = 1.0,
    negative_temperature: float = 0.1 / math.log(3.5),
    smoothing: float = 6.0,
    weight: float = 4.0,
) -> Tensor:
    """Distributional ranking: the hardest positives should score higher than the hardest negatives by a margin.

    With p = sigmoid(logit), ``p+`` is the mean of the positives' p weighted by softmax(-p / positive_temperature),
    ``p-`` that of the negatives' p weighted by softmax(p / negative_temperature); the loss is
    ``weight * softplus(smoothing * (p- - p+ + margin)) / smoothing``. Without positives p+ is 1; without negatives
    the loss is 0. The gradient is ordinary autograd's; targets have the same meaning as in the other losses.

    Args:
        logits: scores before the sigmoid, of any shape.
        targets: of the same shape: above 0 for a positive, 0 for a negative, below 0 for an entry to ignore.
        margin: by how much the hardest positives should exceed the hardest negatives, as probabilities.
        positive_temperature: temperature of the weights of the positives; lower values look at harder positives only.
        negative_temperature: temperature of the weights of the negatives; lower values look at harder negatives only.
        smoothing: steepness of the smoothed hinge; higher values come closer to a hinge.
        weight: factor on the loss.

    >>> # Both scores are 1/2, so the loss is 4 * ln(1 + e^3) / 6.
    >>> dr_loss(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]))
    tensor(2.0324)
    """
    check_dr_settings(
        "dr_loss",
        margin=margin,
        positive_temperature=positive_temperature,
        negative_temperature=negative_temperature,
        smoothing=smoothing,
        weight=weight,
    )
    check_logits("dr_loss", logits, targets)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(targets < 0, 0)
    # Without branches and selections, which depend on values and break the graphs of torch.compile.
    finite = logits.isfinite().all() & (targets < torch.inf).all()
    scores, negative, positive = logits.sigmoid(), targets == 0, targets > 0
    highest_negative = _weighted_mean(scores, scores / negative_temperature, negative)
    lowest_positive = _weighted_mean(scores, -scores / positive_temperature, positive)
    lowest_positive = torch.where(positive.any(), lowest_positive, 1.0)
    loss = weight * softplus(smoothing * (highest_negative - lowest_positive + margin)) / smoothing
    loss = torch.where(negative.any(), loss, 0.0)
    return loss + (logits * torch.where(finite, 0.0, torch.nan)).sum()


def _weighted_mean(values: Tensor, scores: Tensor, used: Tensor) -> Tensor:
    """Return the mean of the used values, weighted by the softmax of their scores; 0 if none is used."""
    scores = torch.where(used | ~used.any(), scores, -torch.inf)
    return (scores.flatten().softmax(0) * (values * used).flatten()).sum()


def check_dr_settings(name: str, **settings: float) -> None:
    """Raise unless ``settings`` are valid settings of DR loss."""
    for setting, value in settings.items():
        if not is_finite_number(value) or (setting != "margin" and value <= 0):
            above = "" if setting == "margin" else " above 0"
            raise ValueError(f"{name}: expected {setting} to be a finite number{above}, got {format_value(value)}")
