"""The gradient of a run's loss at the detections of one image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from bucketrank.detectors.criterion import LOSSES
from bucketrank.detectors.criterion.ranked import SMALLEST_LABEL, Ranked
from bucketrank.detectors.settings import LossSettings
from bucketrank.losses import alrp_loss, ap_loss, dr_loss, rank_sort_loss
from bucketrank.report.matching import LEAST_IOU, Detection

NAMES = {
    "rs": "Rank & Sort loss",
    "ap": "AP loss",
    "alrp": "aLRP loss",
    "dr": "DR loss",
    "focal": "focal loss",
    "ce": "cross-entropy",
}
EDGE = 1e-7  # scores of exactly 0 or 1 have no log-odds


@dataclass(frozen=True)
class Gradients:
    """Of one image, in the order of its detections: the log-odds of the scores, and the loss's gradient there."""

    logits: list[float]
    gradients: list[float]
    loss: float


def gradients(detections: Sequence[Detection], settings: LossSettings) -> Gradients:
    """The classification part of the loss, on the detections of one image as if they were all its candidates.

    A detection that is right has its IoU as target, one that is wrong 0; what is excused is ignored. The numbers are
    those of the loss itself: gradients by identity update for the ranking losses, derived for the others.
    """
    scores = torch.tensor([each.score for each in detections], dtype=torch.float64).clamp(EDGE, 1 - EDGE)
    logits = scores.logit().requires_grad_()
    targets = torch.tensor([_target(each) for each in detections], dtype=torch.float64)
    if not detections:
        return Gradients([], [], 0.0)
    loss = value(logits, targets, settings)
    (gradient,) = torch.autograd.grad(loss, logits, allow_unused=True)
    found = torch.zeros_like(targets) if gradient is None else gradient
    return Gradients(logits.detach().tolist(), found.tolist(), float(loss.detach()))


def value(logits: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    """The loss of a list by its name; targets are IoUs of positives, 0 of negatives, -1 of what is ignored."""
    positives = targets > 0
    match settings.name:
        case "rs":
            terms = rank_sort_loss(logits, targets, delta=delta_of(settings) or 0.0, method=settings.method)
            return terms.ranking + terms.sorting
        case "ap":
            delta, method = delta_of(settings) or 0.0, settings.method
            return ap_loss(logits, targets, delta=delta, method=method, interpolate=settings.interpolate)
        case "alrp":
            errors = (1 - targets[positives]) / (2 * (1 - LEAST_IOU))
            delta = delta_of(settings) or 0.0
            return alrp_loss(logits, targets, errors, delta=delta, method=settings.method).classification
        case "dr":
            return dr_loss(logits, targets)
    taken = targets >= 0
    wanted = positives[taken].to(logits.dtype)
    if settings.name == "focal":
        each = sigmoid_focal_loss(logits[taken], wanted, settings.focal_alpha, settings.focal_gamma, reduction="sum")
        total: Tensor = each / positives.sum().clamp(min=1)
        return total
    return F.binary_cross_entropy_with_logits(logits[taken], wanted, reduction="sum") / taken.sum().clamp(min=1)


def delta_of(settings: LossSettings) -> float | None:
    """The run's own, or that of its loss; None where the loss has none."""
    kind = LOSSES[settings.name]
    if not issubclass(kind, Ranked) or settings.name == "dr":
        return None
    return kind.delta if settings.delta is None else settings.delta


def in_words(settings: LossSettings) -> str:
    """The loss with its method and delta."""
    delta = delta_of(settings)
    return NAMES[settings.name] + ("" if delta is None else f", {settings.method}, delta {delta:g}")


def _target(detection: Detection) -> float:
    if detection.outcome == "excused":
        return -1.0
    return max(detection.iou, SMALLEST_LABEL) if detection.outcome == "right" else 0.0
