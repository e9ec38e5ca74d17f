"""The gradient of a run's loss with respect to the scores of the detections in one image."""

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
from bucketrank.report.matching import MIN_IOU, Detection

NAMES = {
    "rs": "Rank & Sort loss",
    "ap": "AP loss",
    "alrp": "aLRP loss",
    "dr": "DR loss",
    "focal": "focal loss",
    "ce": "cross-entropy",
}
EPSILON = 1e-7  # scores of exactly 0 or 1 have infinite log-odds


@dataclass(frozen=True)
class Gradients:
    """The loss of one image, and its gradient per detection in the order of the detections."""

    logits: list[float]  # the log-odds of the scores
    gradients: list[float]
    loss: float


def gradients(detections: Sequence[Detection], settings: LossSettings) -> Gradients:
    """Compute the classification part of the loss as if the detections were the only candidates of the image.

    The target of a correct detection is its IoU, that of a wrong one is 0; ignored detections do not count. Ranking
    losses define their gradients by the identity update; for the other losses autograd derives them.
    """
    scores = torch.tensor([each.score for each in detections], dtype=torch.float64).clamp(EPSILON, 1 - EPSILON)
    logits = scores.logit().requires_grad_()
    targets = torch.tensor([_target(each) for each in detections], dtype=torch.float64)
    if not detections:
        return Gradients([], [], 0.0)
    loss = value(logits, targets, settings)
    (gradient,) = torch.autograd.grad(loss, logits, allow_unused=True)
    per_detection = torch.zeros_like(targets) if gradient is None else gradient
    return Gradients(logits.detach().tolist(), per_detection.tolist(), float(loss.detach()))


def value(logits: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
    """Return the loss of a list; targets are the IoUs of positives, 0 for negatives and -1 for ignored entries."""
    positives = targets > 0
    match settings.name:
        case "rs":
            terms = rank_sort_loss(logits, targets, delta=delta_of(settings) or 0.0, method=settings.method)
            return terms.ranking + terms.sorting
        case "ap":
            delta, method = delta_of(settings) or 0.0, settings.method
            return ap_loss(logits, targets, delta=delta, method=method, interpolate=settings.interpolate)
        case "alrp":
            errors = (1 - targets[positives]) / (2 * (1 - MIN_IOU))
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
    """Return the run's delta, or the default of its loss; None for a loss without delta."""
    kind = LOSSES[settings.name]
    if not issubclass(kind, Ranked) or settings.name == "dr":
        return None
    return kind.delta if settings.delta is None else settings.delta


def in_words(settings: LossSettings) -> str:
    """Return the name of the loss with its method and delta."""
    delta = delta_of(settings)
    return NAMES[settings.name] + ("" if delta is None else f", {settings.method}, delta {delta:g}")


def _target(detection: Detection) -> float:
    if detection.outcome == "ignored":
        return -1.0
    return max(detection.iou, SMALLEST_LABEL) if detection.outcome == "correct" else 0.0
