"""The criterion of transformers with its classification loss replaced by a ranking loss.

Matching, box losses, auxiliary layers and the names and normalisation of the terms stay those of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bucketrank.integrations.matched_queries import Matching, query_targets
from bucketrank.integrations.ranking_loss import RankingLoss

Target = dict[str, Tensor]

CLASSIFICATION = ("labels", "vfl", "mal")  # the names of the classification loss in the library's criteria
BOX_TERMS = ("loss_bbox", "loss_giou")
RANKING_TERMS = ("loss_rank", "loss_sort")


def replace_classification(criterion: Any, ranking_loss: RankingLoss, class_cost: float | None) -> Any:
    """Put ``ranking_loss`` into a new criterion of the library, and ``class_cost``, if given, into its matcher."""
    library_loss: Callable[..., dict[str, Tensor]] = criterion.get_loss

    def get_loss(
        loss: str, outputs: dict[str, Tensor], targets: list[Target], indices: Matching, num_boxes: float
    ) -> dict[str, Tensor]:
        if loss in CLASSIFICATION:
            return rank_queries(ranking_loss, outputs, targets, indices)
        return library_loss(loss, outputs, targets, indices, num_boxes)

    criterion.get_loss = get_loss
    if class_cost is not None:
        criterion.matcher.class_cost = class_cost
    return criterion


def rank_queries(
    ranking_loss: RankingLoss, outputs: dict[str, Tensor], targets: list[Target], indices: Matching
) -> dict[str, Tensor]:
    """Rank all (query, class) pairs of a layer, over the whole batch; the matched pairs are the positives."""
    labels = query_targets(
        ranking_loss, outputs["logits"], outputs["pred_boxes"], targets, indices, class_key="class_labels"
    )
    return {f"loss_{name}": value for name, value in ranking_loss.terms(outputs["logits"], labels).items()}


def balance(losses: dict[str, Tensor], ranking_loss: RankingLoss) -> dict[str, Tensor]:
    """Self-balance L1 and GIoU loss of every layer, each to the value of that layer's ranking loss.

    With a ``box_weight`` the losses are returned as they are: the fixed weights enter in the sum.
    """
    if ranking_loss.box_weight is not None:
        return losses
    balanced = dict(losses)
    for key in losses:
        for stem in BOX_TERMS:
            if key.startswith(stem):
                layer = key.removeprefix(stem)
                terms = [losses[name + layer] for name in RANKING_TERMS if name + layer in losses]
                balanced[key] = ranking_loss.weigh_box_loss(losses[key], terms)
    return balanced


def weighted_sum(losses: dict[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Sum the terms of all layers, each times the weight under its name without the layer's suffix."""
    return torch.stack(
        [weight * value for key, value in losses.items() for stem, weight in weights.items() if key.startswith(stem)]
    ).sum()
