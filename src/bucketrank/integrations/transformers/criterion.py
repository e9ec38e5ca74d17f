"""The criterion of transformers with its classification loss replaced by a ranking loss.

Matching, box losses, auxiliary layers and the names and normalisation of the terms stay those of the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bucketrank.integrations.matched_queries import Matching
from bucketrank.integrations.ranking_loss import RankingLoss
from bucketrank.integrations.transformers.layer_ranking import Layer, Target, matching_on, rank_layers
from bucketrank.losses import self_balance

CLASSIFICATION = ("labels", "vfl", "mal")  # the names of the classification loss in the library's criteria
BOX_TERMS = ("loss_bbox", "loss_giou")
RANKING_TERMS = ("loss_rank", "loss_sort")


class RankingCriterion:
    """A new criterion of the library whose layers are ranked, all in one call, instead of classified one by one.

    ``class_cost``, if not None, replaces the class cost of its matcher.
    """

    def __init__(self, library: Any, ranking_loss: RankingLoss, class_cost: float | None) -> None:
        self.library, self.ranking_loss = library, ranking_loss
        self.library_loss = library.get_loss
        self.layers: list[Layer] = []
        # The matchings on the device of the logits, each with the library's matching, by the id of the latter.
        self.on_device: dict[int, tuple[Matching, Matching]] = {}
        library.get_loss = self.get_loss
        if class_cost is not None:
            library.matcher.class_cost = class_cost

    def get_loss(
        self, loss: str, outputs: dict[str, Tensor], targets: list[Target], indices: Matching, num_boxes: float
    ) -> dict[str, Tensor]:
        """Return a loss of one layer as the library does, but only keep the layer where it is to be classified."""
        if id(indices) not in self.on_device:
            # The library indexes with tensors on the CPU: on a GPU every such index would be a transfer and a wait.
            self.on_device[id(indices)] = indices, matching_on(outputs["logits"].device, indices)
        matching = self.on_device[id(indices)][1]
        if loss in CLASSIFICATION:
            self.layers.append(Layer(outputs["logits"], outputs["pred_boxes"], targets, matching))
            return {}
        terms: dict[str, Tensor] = self.library_loss(loss, outputs, targets, matching, num_boxes)
        return terms

    def box_losses(self, outputs: dict[str, Any], targets: list[Target]) -> dict[str, Tensor]:
        """Return the terms of the library's criterion for all layers, without those that classify."""
        losses: dict[str, Tensor] = self.library(outputs, targets)
        return losses

    def with_rankings(self, losses: dict[str, Tensor], *, weight: float = 1) -> dict[str, Tensor]:
        """Add the ranking terms of all layers, times ``weight``, before the box terms of their layer.

        ``losses`` are the terms of :meth:`box_losses`. L1 and GIoU loss of every layer are self-balanced, each to the
        ranking loss of that layer. With a ``box_weight`` they stay as they are: the fixed weights enter in the sum.
        """
        suffixes = [key.removeprefix("loss_bbox") for key in losses if key.startswith("loss_bbox")]
        values = [weight * term for term in rank_layers(self.ranking_loss, self.layers).values()]
        # This object and the library's criterion refer to each other, so Python frees them late. Free the layers now.
        self.layers, self.on_device = [], {}
        totals = torch.stack(values).sum(0)
        # The library computes the box terms of the layers in the order in which it classifies the layers.
        of_layers = zip(suffixes, zip(*(value.unbind() for value in values), strict=True), totals, strict=True)
        rankings = {suffix: (terms, total) for suffix, terms, total in of_layers}
        complete = {}
        for key, value in losses.items():
            stem = next((stem for stem in BOX_TERMS if key.startswith(stem)), None)
            if stem is None:
                complete[key] = value
                continue
            suffix = key.removeprefix(stem)
            terms, total = rankings[suffix]
            if stem == BOX_TERMS[0]:
                complete |= {name + suffix: term for name, term in zip(RANKING_TERMS, terms, strict=False)}
            complete[key] = value if self.ranking_loss.box_weight is not None else self_balance(value, to=total)
        return complete


def weighted_sum(losses: dict[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Sum the terms of all layers, each times the weight under its name without the layer's suffix."""
    return torch.stack(
        [weight * value for key, value in losses.items() for stem, weight in weights.items() if key.startswith(stem)]
    ).sum()
