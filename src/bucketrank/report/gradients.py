"""The gradient of a run's loss with respect to the scores of the detections in one image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bucketrank.catalogue import LossSettings, RankingSettings, loss_spec
from bucketrank.detectors.criterion import HeadRecipe, build_criterion
from bucketrank.detectors.criterion.assigned import SMALLEST_LABEL
from bucketrank.report.matching import MIN_IOU, Detection

EPSILON = 1e-7  # scores of exactly 0 or 1 have infinite log-odds


@dataclass(frozen=True)
class Gradients:
    """The loss of one image, and its gradient per detection in the order of the detections."""

    logits: list[float]  # the log-odds of the scores
    gradients: list[float]
    loss: float


def gradients(
    detections: Sequence[Detection], settings: LossSettings, *, scores: Sequence[float] | None = None
) -> Gradients:
    """Compute the classification part of the loss as if the detections were the only candidates of the image.

    The target of a correct detection is its IoU, that of a wrong one is 0; ignored detections do not count. Ranking
    losses define their gradients by the identity update; for the other losses autograd derives them. ``scores`` are
    those of the detections before calibration, which training ranked; by default their own.
    """
    ranked = [each.score for each in detections] if scores is None else list(scores)
    logits = torch.tensor(ranked, dtype=torch.float64).clamp(EPSILON, 1 - EPSILON).logit().requires_grad_()
    targets = torch.tensor([_target(each) for each in detections], dtype=torch.float64)
    if not detections:
        return Gradients([], [], 0.0)
    # With samples, cross-entropy is a mean over all entries, as in the heads that train on a sample of them.
    loss = build_criterion(settings, HeadRecipe(samples=True, least_iou=MIN_IOU)).list_loss(logits, targets)
    (gradient,) = torch.autograd.grad(loss, logits, allow_unused=True)
    per_detection = torch.zeros_like(targets) if gradient is None else gradient
    return Gradients(logits.detach().tolist(), per_detection.tolist(), float(loss.detach()))


def delta_of(settings: LossSettings) -> float | None:
    """Return the delta in use; None for a loss without one."""
    return settings.effective_delta if isinstance(settings, RankingSettings) else None


def describe_loss(settings: LossSettings) -> str:
    """Return the title of the loss with its method and delta."""
    title = loss_spec(settings.name).heading
    if not isinstance(settings, RankingSettings):
        return title
    return f"{title}, {settings.method}, delta {settings.effective_delta:g}"


def _target(detection: Detection) -> float:
    if detection.outcome == "ignored":
        return -1.0
    return max(detection.iou, SMALLEST_LABEL) if detection.outcome == "correct" else 0.0
