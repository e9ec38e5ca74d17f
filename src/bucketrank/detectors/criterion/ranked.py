"""The ranking losses: every candidate takes part; boxes by GIoU, weighted by confidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bucketrank.catalogue import RankingSettings
from bucketrank.catalogue.loss_specs import ALRPSettings, APSettings
from bucketrank.detectors.criterion.assigned import Assigned
from bucketrank.detectors.criterion.base import Criterion, HeadRecipe, Terms, confidences, dice_errors
from bucketrank.losses import alrp_loss, ap_loss, dr_loss, rank_sort_loss, self_balance
from bucketrank.ops.boxes import paired_iou

# The label of a positive whose box does not overlap at all: above 0, or it would count as a negative.
SMALLEST_LABEL = 1e-6

COCO_EPOCH = 7330  # iterations with 16 images each, of those with objects


class Ranked(Criterion):
    """What the ranking losses share."""

    ranking = True
    classification_terms: ClassVar[tuple[str, ...]] = ("rank",)

    def forward(self, found: Assigned) -> Terms:
        weight = self.recipe.ranking_weight
        return {name: weight * term for name, term in self.terms(found).items()}

    def terms(self, found: Assigned) -> Terms:
        """The terms before the head's weight: the ranking, and the boxes by their fixed weight."""
        (rank,) = self.scope.rank(self.loss, found.logits, found.targets(1.0), images=found.images)
        return {"rank": rank, **self.weighted_boxes(found)}

    def loss(self, logits: Tensor, targets: Tensor, errors: Tensor | None) -> Sequence[Tensor]:
        """Return the terms of the loss of one ranking.

        ``errors`` (P,) are localisation errors of the positives, for the losses that rank them too; otherwise None.
        """
        raise NotImplementedError

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([*self.loss(logits, targets, None)]).sum()

    def boxes(self, found: Assigned) -> dict[str, tuple[float, Tensor]]:
        """The box losses by name, each with its weight.

        A mean over positives, weighted by confidence (upstream: the highest score of any class) unless the head's
        recipe says otherwise.
        """
        weights = confidences(found.logits[found.positives])
        weights = weights if self.recipe.confident else torch.ones_like(weights)
        return {name: (weight, self.mean(errors, weights)) for name, (weight, errors) in self.box_parts(found).items()}

    def weighted_boxes(self, found: Assigned) -> Terms:
        """The box losses by name, for losses that do not balance them."""
        return {name: weight * term for name, (weight, term) in self.boxes(found).items()}

    def masks(self, logits: Tensor, targets: Tensor, *, confidences: Tensor, balance: Tensor) -> Tensor:
        return self.mean(dice_errors(logits, targets), confidences)


class Compared(Ranked):
    """What the losses share that compare logits through the smoothed step: delta and method."""

    settings: RankingSettings

    @property
    def delta(self) -> float:
        """Half the width of the ramp."""
        return self.settings.effective_delta


class RankSort(Compared):
    """RS loss (BRS with ``method="bucketed"``); boxes and masks are balanced to its value: nothing is to be tuned."""

    classification_terms: ClassVar[tuple[str, ...]] = ("rank", "sort")

    def terms(self, found: Assigned) -> Terms:
        labels = paired_iou(found.boxes.detach(), found.objects).clamp(min=SMALLEST_LABEL)
        ranking, sorting = self.scope.rank(self.loss, found.logits, found.targets(labels), images=found.images)
        boxes = self.boxes(found).items()
        balanced = {name: self_balance(term, to=ranking + sorting) for name, (_, term) in boxes}
        return {"rank": ranking, "sort": sorting, **balanced}

    def loss(self, logits: Tensor, targets: Tensor, errors: Tensor | None) -> Sequence[Tensor]:
        return rank_sort_loss(logits, targets, delta=self.delta, method=self.settings.method)

    def masks(self, logits: Tensor, targets: Tensor, *, confidences: Tensor, balance: Tensor) -> Tensor:
        return self_balance(super().masks(logits, targets, confidences=confidences, balance=balance), to=balance)


class AveragePrecision(Compared):
    """AP loss (BAP with ``method="bucketed"``)."""

    settings: APSettings

    def loss(self, logits: Tensor, targets: Tensor, errors: Tensor | None) -> Sequence[Tensor]:
        settings = self.settings
        return (ap_loss(logits, targets, delta=self.delta, method=settings.method, interpolate=settings.interpolate),)


class ALRP(Compared):
    """aLRP loss; the weight of the boxes is set anew every ``balance_period`` iterations, from those before."""

    settings: ALRPSettings
    balance: Tensor
    sums: Tensor
    seen: Tensor

    def __init__(self, settings: ALRPSettings, recipe: HeadRecipe) -> None:
        super().__init__(settings, recipe)
        self.period = settings.balance_period or COCO_EPOCH
        self.register_buffer("balance", torch.tensor(50.0))
        self.register_buffer("sums", torch.zeros(2))
        self.register_buffer("seen", torch.tensor(0))

    def terms(self, found: Assigned) -> Terms:
        # An error of 1 is a box that only just deserves its object: GIoU loss runs to 2, and is halved.
        errors = self.box_errors(found) / (2 * (1 - self.recipe.least_iou))
        classification, localisation = self.scope.rank(
            self.loss, found.logits, found.targets(1.0), images=found.images, values=errors
        )
        balanced = localisation * self.balance.clone()
        if self.training:
            self._account(classification.detach(), localisation.detach())
        return {"rank": classification, "box": balanced}

    def loss(self, logits: Tensor, targets: Tensor, errors: Tensor | None) -> Sequence[Tensor]:
        localisation = logits.new_zeros(0) if errors is None else errors
        return alrp_loss(logits, targets, localisation, delta=self.delta, method=self.settings.method)

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        errors = (1 - targets[targets > 0]) / (2 * (1 - self.recipe.least_iou))
        classification, _ = self.loss(logits, targets, errors)
        return classification

    @torch.no_grad()
    def _account(self, classification: Tensor, localisation: Tensor) -> None:
        self.sums += torch.stack([classification, localisation])
        self.seen += 1
        full = self.seen >= self.period
        fresh = self.sums.sum() / self.sums[1].clamp(min=1e-10)
        self.balance.copy_(torch.where(full & (self.sums[1] > 0), fresh, self.balance))
        self.sums.mul_(torch.where(full, 0.0, 1.0))
        self.seen.mul_(torch.where(full, 0, 1))


class DR(Ranked):
    """DR loss: distributions ranked instead of entries."""

    prior = 0.5

    def loss(self, logits: Tensor, targets: Tensor, errors: Tensor | None) -> Sequence[Tensor]:
        return (dr_loss(logits, targets),)
