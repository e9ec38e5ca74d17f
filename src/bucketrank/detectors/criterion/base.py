"""The base of every criterion: it turns the logits, boxes and assignment of one head into loss terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bucketrank.catalogue import LossSettings
from bucketrank.detectors.criterion.assigned import Assigned
from bucketrank.detectors.ranking_scope import SCOPES
from bucketrank.losses import self_balance
from bucketrank.ops.boxes import giou_loss

LossTerms = dict[str, Tensor]


@dataclass(frozen=True)
class HeadRecipe:
    """The published choices for the losses of a head; the user's settings have precedence."""

    ranking_weight: float = 1.0  # of all terms of the head under a ranking loss
    scored_weight: float = 1.0  # of all terms of the head under a score-based loss
    box_loss: str = "giou"  # under a score-based loss; the ranking losses use GIoU
    ranking_box_weight: float = 1.0  # under a ranking loss that does not balance the box loss
    scored_box_weight: float = 1.0
    l1_weight: float | None = None  # of an L1 loss of the deltas in addition to GIoU, as in DETR; None: no such loss
    quality_weight: float = 1.0
    prior: float = 0.5  # the initial probability of the classifier
    confident: bool = True  # whether ranking losses weight a box by its score; otherwise positives count equally
    least_iou: float = 0.5  # the minimum IoU of a positive; aLRP scales localisation errors by it
    samples: bool = False  # whether cross-entropy trains on a balanced sample of the candidates
    softmax: bool = False  # whether cross-entropy uses a softmax with a background logit


class Criterion(nn.Module):
    """Base class of the criteria: properties that a head reads when it is built, and parts that the losses share."""

    ranking = False  # whether it is a ranking loss, which needs no sampling
    quality_branch = False  # whether scores are multiplied by a predicted quality, as the loss does not see the IoU
    always_giou = True  # whether the published box loss is GIoU in every detector; otherwise the head's recipe says it
    self_balanced = False  # whether the published box and mask losses are scaled to the classification loss
    prior: float | None = None  # initial probability that the loss requires; None: the head's
    classification_terms: ClassVar[tuple[str, ...]] = ("cls",)  # the names of the terms that train the logits
    matching_focal = (0.25, 2.0)  # alpha and gamma of the class cost in Hungarian matching

    def __init__(self, settings: LossSettings, recipe: HeadRecipe) -> None:
        super().__init__()
        self.settings, self.recipe = settings, recipe
        self.scope = SCOPES[settings.ranking_scope]()
        published = recipe.ranking_box_weight if self.ranking else recipe.scored_box_weight
        self.box_weight = published if settings.box_weight is None else settings.box_weight
        self.box_loss = settings.box_loss or ("giou" if self.always_giou else recipe.box_loss)
        balanced = self.self_balanced and settings.box_weight is None
        self.box_balance = balanced if settings.box_balance is None else settings.box_balance

    @property
    def samples(self) -> bool:
        """Whether the head must train on a sample of its candidates."""
        return False

    @property
    def softmax(self) -> bool:
        """Whether classes exclude each other and the last logit is the background's."""
        return False

    @property
    def initial_score(self) -> float:
        """The initial probability of the head's classifier."""
        return self.recipe.prior if self.prior is None else self.prior

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores (R, C) that rank detections."""
        return logits.float().softmax(-1)[..., :-1] if self.softmax else logits.float().sigmoid()

    def forward(self, assigned: Assigned | list[Assigned]) -> LossTerms | list[LossTerms]:
        """Return the loss terms of a head by name; training minimises their sum.

        A list of inputs, such as the layers of a decoder, gives a list of terms. Each input is ranked on its own, but
        one call of the loss ranks them all where the loss can do that.
        """
        if isinstance(assigned, Assigned):
            (terms,) = self.terms_of_all([assigned])
            return self.weighted(terms)
        return [self.weighted(terms) for terms in self.terms_of_all(assigned)]

    def weighted(self, terms: LossTerms) -> LossTerms:
        """Return the terms times the weight of the head."""
        weight = self.recipe.ranking_weight if self.ranking else self.recipe.scored_weight
        return {name: weight * term for name, term in terms.items()}

    def terms_of_all(self, batch: Sequence[Assigned]) -> list[LossTerms]:
        """Return the terms of several inputs before the head's weight applies."""
        return [self.terms(assigned) for assigned in batch]

    def terms(self, assigned: Assigned) -> LossTerms:
        """Return the terms of one input before the head's weight applies."""
        raise NotImplementedError

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the classification loss of a plain list, for reports.

        ``logits`` and ``targets`` are (n,); a target is the IoU of a positive, 0 for a negative, -1 if ignored.
        """
        raise NotImplementedError

    def classification_loss(self, terms: LossTerms) -> Tensor:
        """Return the sum of the terms that train the logits."""
        return torch.stack([term for name, term in terms.items() if name in self.classification_terms]).sum()

    def box_errors(self, assigned: Assigned) -> Tensor:
        """Return the box loss (P,) of each positive."""
        if self.box_loss == "giou":
            return giou_loss(assigned.boxes, assigned.objects)
        return delta_errors(assigned, beta=self.settings.smooth_l1_beta if self.box_loss == "smooth_l1" else 0.0)

    def box_parts(self, assigned: Assigned) -> dict[str, tuple[float, Tensor]]:
        """Return the box losses by name: each with its weight relative to the classification, and its errors (P,)."""
        parts = {"box": (self.box_weight, self.box_errors(assigned))}
        if self.recipe.l1_weight is not None:
            parts["l1"] = (self.recipe.l1_weight, delta_errors(assigned, beta=0.0))
        return parts

    def box_weights(self, assigned: Assigned) -> Tensor | None:
        """Return the weight (P,) of each positive in the mean of a box loss; None: they count equally."""
        if self.settings.box_confidence is None:
            return self.published_box_weights(assigned)
        return self.confidences(assigned) if self.settings.box_confidence else None

    def published_box_weights(self, assigned: Assigned) -> Tensor | None:
        """Return the weights as published for this loss."""
        return None

    def confidences(self, assigned: Assigned) -> Tensor:
        """Return the highest score (P,) of any class of each positive, without gradient."""
        return self.highest_scores(assigned.logits[assigned.rows])

    def highest_scores(self, logits: Tensor) -> Tensor:
        """Return the highest score (R,) of any class of each row, without gradient."""
        return self.scores(logits.detach()).amax(1)

    def box_terms(self, assigned: Assigned, classification: Tensor, norm: Tensor | None = None) -> LossTerms:
        """Return the box losses by name: each a mean over the positives, weighted or scaled to ``classification``.

        If the positives count equally, ``norm`` divides the sum of their errors; by default it is their number.
        """
        weights = self.box_weights(assigned)
        terms = {}
        for name, (weight, errors) in self.box_parts(assigned).items():
            if weights is None and norm is not None:
                mean = self.scope.total(errors.sum()) / norm
            else:
                mean = self.mean(errors, torch.ones_like(errors) if weights is None else weights)
            terms[name] = self_balance(mean, to=classification) if self.box_balance else weight * mean
        return terms

    def mean(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean of ``values`` over the ranking scope; 0 if there are none."""
        return self.scope.total((values * weights).sum()) / self.scope.total(weights.sum()).clamp(min=1e-10)


def delta_errors(assigned: Assigned, *, beta: float) -> Tensor:
    """Return the smooth L1 distance (P,) of the deltas, quadratic below ``beta``."""
    return F.smooth_l1_loss(assigned.box_deltas, assigned.target_deltas, reduction="none", beta=beta).sum(1)


def named(head: str, terms: LossTerms) -> LossTerms:
    """Return the terms with the name of their head before each name."""
    return {f"{head}_{name}": term for name, term in terms.items()}
