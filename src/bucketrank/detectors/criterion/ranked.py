"""Ranking-loss criteria: all candidates are ranked, and the box loss is confidence-weighted GIoU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from bucketrank.detectors.criterion.base import Assigned, Criterion, HeadRecipe, LossTerms
from bucketrank.detectors.criterion.memory import ScoreQueues
from bucketrank.losses import alrp_loss, ap_loss, dr_loss, quality_focal_loss, rank_sort_loss
from bucketrank.settings import RankingSettings
from bucketrank.settings.loss_specs import ALRPSettings, APSettings, RankSortQualitySettings, RememberingSettings

COCO_EPOCH = 7330  # iterations per epoch over the COCO training images with objects, batch size 16


class Ranked(Criterion):
    """Base class of the ranking losses."""

    ranking = True
    classification_terms: ClassVar[tuple[str, ...]] = ("rank",)
    ranks_parts = False  # whether the loss takes ``sizes``, to rank parts of a list separately

    def terms(self, assigned: Assigned) -> LossTerms:
        (rank,) = self.rank(assigned, assigned.targets(1.0))
        return {"rank": rank, **self.box_terms(assigned, rank)}

    def rank(self, assigned: Assigned, targets: Tensor, errors: Tensor | None = None) -> tuple[Tensor, ...]:
        """Compute the loss terms of one input in the ranking scope."""
        images, parts = assigned.image_index, self.ranks_parts
        return self.scope.rank(self.loss, assigned.logits, targets, images=images, values=errors, parts=parts)

    def loss(self, logits: Tensor, targets: Tensor, errors: Tensor | None) -> Sequence[Tensor]:
        """Compute the loss terms of one ranking.

        ``errors`` (P,) are the positives' localisation errors for aLRP, otherwise None.
        """
        raise NotImplementedError

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([*self.loss(logits, targets, None)]).sum()

    def published_box_weights(self, assigned: Assigned) -> Tensor | None:
        return self.confidences(assigned) if self.recipe.confident else None


class SmoothedRanked(Ranked):
    """Base class of the losses with a smoothed step function, and thus with ``delta`` and ``method``."""

    settings: RankingSettings
    ranks_parts = True

    @property
    def delta(self) -> float:
        """Half-width of the smoothed step: logits closer than this count as partly tied."""
        return self.settings.effective_delta

    def loss(self, logits: Tensor, targets: Tensor, errors: Tensor | None, **parts: Any) -> Sequence[Tensor]:
        """Compute the loss terms; ``parts`` are ``sizes`` and ``reduction``, to rank parts of a list separately."""
        raise NotImplementedError


class Remembering(SmoothedRanked):
    """Base class of the losses that may rank a step together with the scores of earlier steps."""

    settings: RememberingSettings

    def __init__(self, settings: RememberingSettings, recipe: HeadRecipe) -> None:
        super().__init__(settings, recipe)
        self.memory = ScoreQueues(settings.memory, recipe.inputs) if settings.memory else None

    def rank_all(self, batch: Sequence[Assigned], targets: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Rank each input of a batch separately, in a single loss call if possible; return their loss terms."""
        pairs = list(zip(batch, targets, strict=True))
        if len(batch) == 1 or not self.scope.joins_calls:
            return [
                self.scope.rank(
                    partial(self._rank, number), each.logits, target, images=each.image_index, values=None, parts=True
                )
                for number, (each, target) in enumerate(pairs)
            ]
        lists = [
            self._remember(number, each.logits.flatten(), target.flatten())
            for number, (each, target) in enumerate(pairs)
        ]
        logits, joined = (torch.cat(parts) for parts in zip(*lists, strict=True))
        sizes = [len(part) for part, _ in lists]
        terms = self.loss(logits, joined, None, sizes=sizes, reduction="none")
        return list(zip(*(term.unbind() for term in terms), strict=True))

    def _rank(
        self, number: int, logits: Tensor, targets: Tensor, errors: Tensor | None, **parts: Any
    ) -> Sequence[Tensor]:
        return self.loss(*self._remember(number, logits, targets), errors, **parts)

    def _remember(self, number: int, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Append the memory of input ``number`` in training."""
        if self.memory is None or not self.training:
            return logits, targets
        return self.memory.join(number, logits, targets)


class RankSort(Remembering):
    """RS loss (BRS with ``method="bucketed"``). Box and mask losses are scaled to its value and need no tuning."""

    self_balanced = True
    classification_terms: ClassVar[tuple[str, ...]] = ("rank", "sort")

    def terms_of_all(self, batch: Sequence[Assigned]) -> list[LossTerms]:
        values = self.rank_all(batch, [assigned.targets(assigned.ious) for assigned in batch])
        return [
            {"rank": ranking, "sort": sorting, **self.box_terms(assigned, ranking + sorting)}
            for assigned, (ranking, sorting) in zip(batch, values, strict=True)
        ]

    def loss(self, logits: Tensor, targets: Tensor, errors: Tensor | None, **parts: Any) -> Sequence[Tensor]:
        return rank_sort_loss(logits, targets, delta=self.delta, method=self.settings.method, **parts)


class AveragePrecision(Remembering):
    """AP loss (BAP with ``method="bucketed"``)."""

    settings: APSettings

    def terms_of_all(self, batch: Sequence[Assigned]) -> list[LossTerms]:
        values = self.rank_all(batch, [assigned.targets(1.0) for assigned in batch])
        pairs = zip(batch, values, strict=True)
        return [{"rank": rank, **self.box_terms(assigned, rank)} for assigned, (rank,) in pairs]

    def loss(self, logits: Tensor, targets: Tensor, errors: Tensor | None, **parts: Any) -> Sequence[Tensor]:
        options: dict[str, Any] = {"method": self.settings.method, "interpolate": self.settings.interpolate, **parts}
        return (ap_loss(logits, targets, delta=self.delta, **options),)


class ALRP(SmoothedRanked):
    """aLRP loss. The box loss weight is recomputed from the terms of the last ``balance_period`` iterations."""

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

    def terms(self, assigned: Assigned) -> LossTerms:
        # LRP uses (1 - IoU) / (1 - minimum IoU). The GIoU loss goes up to 2, so half of it replaces 1 - IoU.
        errors = self.box_errors(assigned) / (2 * (1 - self.recipe.min_iou))
        classification, localisation = self.rank(assigned, assigned.targets(1.0), errors)
        balanced = localisation * self.balance.clone()
        if self.training:
            self._update_balance(classification.detach(), localisation.detach())
        return {"rank": classification, "box": balanced}

    def loss(self, logits: Tensor, targets: Tensor, errors: Tensor | None, **parts: Any) -> Sequence[Tensor]:
        localisation = logits.new_zeros(0) if errors is None else errors
        return alrp_loss(logits, targets, localisation, delta=self.delta, method=self.settings.method, **parts)

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        errors = (1 - targets[targets > 0]) / (2 * (1 - self.recipe.min_iou))
        classification, _ = self.loss(logits, targets, errors)
        return classification

    @torch.no_grad()
    def _update_balance(self, classification: Tensor, localisation: Tensor) -> None:
        # A single non-finite step must not spoil the sums of the whole period.
        self.sums += torch.stack([classification, localisation]).nan_to_num(0.0, 0.0, 0.0)
        self.seen += 1
        period_ended = self.seen >= self.period
        new_balance = self.sums.sum() / self.sums[1].clamp(min=1e-10)
        self.balance.copy_(torch.where(period_ended & (self.sums[1] > 0), new_balance, self.balance))
        self.sums.mul_(torch.where(period_ended, 0.0, 1.0))
        self.seen.mul_(torch.where(period_ended, 0, 1))


class DR(Ranked):
    """DR loss, which ranks the distributions of positives and negatives instead of single logits."""

    prior = 0.5

    def loss(self, logits: Tensor, targets: Tensor, errors: Tensor | None) -> Sequence[Tensor]:
        return (dr_loss(logits, targets),)


class RankSortQuality(RankSort):
    """RS loss plus Quality Focal Loss, whose scores predict the IoU.

    Box losses are balanced against RS loss only, mask losses against the sum of both.
    """

    prior = 0.01
    classification_terms: ClassVar[tuple[str, ...]] = ("rank", "sort", "qfl")
    settings: RankSortQualitySettings

    def terms_of_all(self, batch: Sequence[Assigned]) -> list[LossTerms]:
        return [
            {**terms, "qfl": self.quality_focal(assigned.logits, assigned.targets(assigned.ious))}
            for assigned, terms in zip(batch, super().terms_of_all(batch), strict=True)
        ]

    def quality_focal(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute Quality Focal Loss, divided by the number of positives."""
        total = quality_focal_loss(logits, targets, beta=self.settings.quality_beta, reduction="sum")
        positives = (targets > 0).sum().to(total.dtype)
        return self.scope.total(total) / self.scope.total(positives).clamp(min=1)

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().list_loss(logits, targets) + self.quality_focal(logits, targets)
