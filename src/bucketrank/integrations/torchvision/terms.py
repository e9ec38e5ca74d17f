"""The losses of one head: its logits ranked, its boxes by GIoU."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import generalized_box_iou_loss

from bucketrank.integrations.ranking import Ranking
from bucketrank.losses import self_balance
from bucketrank.ops.boxes import paired_iou

BACKGROUND, IGNORED = -1, -2  # as torchvision's Matcher numbers them


def head_terms(
    ranking: Ranking, logits: Tensor, labels: Tensor, *, boxes: Tensor, objects: Tensor
) -> dict[str, Tensor]:
    """``rank``, ``sort`` (RS only) and ``box`` of R candidates, P of them positive.

    ``logits`` is (R, C); ``labels`` (R,) holds a column of ``logits``, ``BACKGROUND`` or ``IGNORED``. ``boxes`` (P, 4)
    are the boxes predicted by the positives, in order, ``objects`` (P, 4) those they should be. The box term is GIoU
    loss averaged with the positives' confidences as weights, scaled to the value of the ranking terms.
    """
    positives = torch.where(labels >= 0)[0]
    boxes, objects = boxes.float(), objects.float()

    targets = torch.zeros_like(logits, dtype=torch.float32)
    targets[labels == IGNORED] = -1
    targets[positives, labels[positives]] = ranking.labels(paired_iou(boxes, objects))
    terms = ranking.terms(logits, targets)

    confidences = logits[positives].detach().float().sigmoid().amax(1)
    errors = generalized_box_iou_loss(boxes, objects)
    box = (errors * confidences).sum() / confidences.sum().clamp(min=1e-10)
    return terms | {"box": self_balance(box, to=torch.stack(list(terms.values())).sum())}


def named(terms: dict[str, Tensor], scores: str, boxes: str, *, weight: float = 1.0) -> dict[str, Tensor]:
    """The terms under the names of a model's loss dict: ``<scores>_rank``, ``<scores>_sort`` and ``<boxes>``."""
    return {boxes if name == "box" else f"{scores}_{name}": weight * term for name, term in terms.items()}
