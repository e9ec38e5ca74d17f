"""The library's own criterion, with its classification loss replaced by a ranking loss.

Matching, box losses, auxiliary layers, the names of the terms and their normalisation stay the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bucketrank.integrations.ranking import Ranking
from bucketrank.losses import self_balance
from bucketrank.ops.boxes import paired_iou

Target = dict[str, Tensor]
Matching = Sequence[tuple[Tensor, Tensor]]  # for each image: queries, and the objects they are matched to

CLASSIFICATION = ("labels", "vfl", "mal")  # what the criteria call their classification loss
BOXES = ("loss_bbox", "loss_giou")
RANKED = ("loss_rank", "loss_sort")


def rank_instead(criterion: Any, ranking: Ranking, class_cost: float | None) -> Any:
    """Give ``criterion``, fresh from the library, the ranking loss and the cost of a class in its matching."""
    library_term: Callable[..., dict[str, Tensor]] = criterion.get_loss

    def term(
        loss: str, outputs: dict[str, Tensor], targets: list[Target], indices: Matching, num_boxes: float
    ) -> dict[str, Tensor]:
        if loss in CLASSIFICATION:
            return rank_queries(ranking, outputs, targets, indices)
        return library_term(loss, outputs, targets, indices, num_boxes)

    criterion.get_loss = term
    if class_cost is not None:
        criterion.matcher.class_cost = class_cost
    return criterion


def rank_queries(
    ranking: Ranking, outputs: dict[str, Tensor], targets: list[Target], indices: Matching
) -> dict[str, Tensor]:
    """Rank all (query, class) pairs of a layer, the whole batch as one list; matched pairs are the positives."""
    logits, boxes = outputs["logits"], outputs["pred_boxes"].detach()  # (B, Q, C), (B, Q, 4)
    matched = list(zip(targets, indices, strict=True))
    image = torch.cat([torch.full_like(queries, b) for b, (queries, _) in enumerate(indices)]).to(logits.device)
    query = torch.cat([queries for queries, _ in indices]).to(logits.device)
    classes = torch.cat([target["class_labels"][objects] for target, (_, objects) in matched])
    truth = torch.cat([target["boxes"][objects] for target, (_, objects) in matched])
    labels = torch.zeros_like(logits)
    labels[image, query, classes] = ranking.labels(overlaps(boxes[image, query], truth)).to(labels.dtype)
    return {f"loss_{name}": value for name, value in ranking.terms(logits, labels).items()}


def overlaps(boxes: Tensor, others: Tensor) -> Tensor:
    """IoU of each box with the other in its place; both (n, 4) as centre and size, in units of the image."""
    boxes, others = (torch.cat([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2], 1) for b in (boxes, others))
    return paired_iou(boxes, others, smallest_union=torch.finfo(boxes.dtype).tiny)


def balance(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    """Scale the L1 and the GIoU loss of every layer, each, to the value of the ranking loss of the same layer."""
    balanced = dict(losses)
    for key in losses:
        for stem in BOXES:
            if key.startswith(stem):
                layer = key.removeprefix(stem)
                ranked = [losses[name + layer] for name in RANKED if name + layer in losses]
                balanced[key] = self_balance(losses[key], to=torch.stack(ranked).sum())
    return balanced


def total(losses: dict[str, Tensor], weight: float) -> Tensor:
    """The sum of the terms that train, by the one weight that is left where boxes are balanced."""
    return weight * torch.stack([value for key, value in losses.items() if key.startswith((*RANKED, *BOXES))]).sum()
