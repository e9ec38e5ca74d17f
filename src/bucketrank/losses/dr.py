"""DR loss (Qian et al., CVPR 2020), a differentiable baseline that ranks distributions in one pass over the logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bucketrank.losses.functional import check_logits, format_value, is_finite_number


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
    """DR loss, ``weight / smoothing * softplus(smoothing * (p- - p+ + margin))``: a margin between distributions.

    With p = sigmoid(logit), ``p+`` is the mean positive p weighted by softmax(-p / positive_temperature), and ``p-``
    the mean negative p weighted by softmax(p / negative_temperature): the hardest positives should score higher than
    the hardest negatives by ``margin``. Without positives p+ is 1; without negatives the loss is 0. The gradient comes
    from ordinary autograd. Targets have the same meaning as in the other losses.

    Args:
        logits: scores before the sigmoid, of any shape.
        targets: of the same shape: above 0 for a positive, 0 for a negative, below 0 for an ignored entry.
        margin: desired difference between the hardest positives and the hardest negatives, as probabilities.
        positive_temperature: softmax temperature for positives; lower values focus on harder positives.
        negative_temperature: softmax temperature for negatives; lower values focus on harder negatives.
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
    # No branch or selection depends on values: that would break torch.compile graphs.
    finite = logits.isfinite().all() & (targets < torch.inf).all()
    scores, negative, positive = logits.sigmoid(), targets == 0, targets > 0
    highest_negative = _weighted_mean(scores, scores / negative_temperature, negative)
    lowest_positive = _weighted_mean(scores, -scores / positive_temperature, positive)
    lowest_positive = torch.where(positive.any(), lowest_positive, 1.0)
    loss = weight * softplus(smoothing * (highest_negative - lowest_positive + margin)) / smoothing
    loss = torch.where(negative.any(), loss, 0.0)
    return loss + (logits * torch.where(finite, 0.0, torch.nan)).sum()


def _weighted_mean(values: Tensor, scores: Tensor, used: Tensor) -> Tensor:
    """Average the used values, weighted by the softmax of their scores; 0 if none is used."""
    scores = torch.where(used | ~used.any(), scores, -torch.inf)
    return (scores.flatten().softmax(0) * (values * used).flatten()).sum()


def check_dr_settings(name: str, **settings: float) -> None:
    """Raise ValueError unless these are valid settings of DR loss."""
    for setting, value in settings.items():
        if not is_finite_number(value) or (setting != "margin" and value <= 0):
            above = "" if setting == "margin" else " above 0"
            raise ValueError(f"{name}: expected {setting} to be a finite number{above}, got {format_value(value)}")
