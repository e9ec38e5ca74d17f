"""The losses of one head: a ranking loss for its logits and GIoU loss for its boxes."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import generalized_box_iou_loss

from bucketrank.integrations.ranking_loss import RankingLoss
from bucketrank.ops.boxes import paired_iou

BACKGROUND, IGNORED = -1, -2  # the numbers of torchvision's Matcher


def head_terms(
    ranking_loss: RankingLoss, logits: Tensor, labels: Tensor, *, boxes: Tensor, objects: Tensor
) -> dict[str, Tensor]:
    """Return ``rank``, ``sort`` (Rank & Sort only) and ``box`` for R candidates, P of which are positives.

    ``logits`` is (R, C). ``labels`` (R,) holds a column of ``logits``, ``BACKGROUND`` or ``IGNORED``. ``boxes`` (P, 4)
    are the predicted boxes of the positives, in the order of ``labels``, and ``objects`` (P, 4) their ground truth.
    The box term is the mean GIoU loss, weighted by the confidences of the positives. It is then self-balanced to the
    ranking terms, or multiplied by ``box_weight`` if that is set.
    """
    positives = torch.where(labels >= 0)[0]
    boxes, objects = boxes.float(), objects.float()

    targets = torch.zeros_like(logits, dtype=torch.float32)
    targets[labels == IGNORED] = -1
    targets[positives, labels[positives]] = ranking_loss.labels(paired_iou(boxes, objects))
    terms = ranking_loss.terms(logits, targets)

    confidences = logits[positives].detach().float().sigmoid().amax(1)
    errors = generalized_box_iou_loss(boxes, objects)
    box_loss = (errors * confidences).sum() / confidences.sum().clamp(min=1e-10)
    return terms | {"box": ranking_loss.weigh_box_loss(box_loss, terms.values())}


def named(terms: dict[str, Tensor], scores: str, boxes: str, *, weight: float = 1.0) -> dict[str, Tensor]:
    """Rename the terms to ``<scores>_rank``, ``<scores>_sort`` and ``<boxes>``, each multiplied by ``weight``."""
    return {boxes if name == "box" else f"{scores}_{name}": weight * term for name, term in terms.items()}
