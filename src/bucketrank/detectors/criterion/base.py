"""What every criterion is: the terms of one head, from its logits, boxes and assignment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import generalized_box_iou_loss

from bucketrank.catalogue import LossSettings
from bucketrank.detectors.criterion.assigned import Assigned
from bucketrank.detectors.scope import SCOPES

Terms = dict[str, Tensor]


@dataclass(frozen=True)
class HeadRecipe:
    """What a head's published recipe says about its losses; the settings go before it."""

    ranking_weight: float = 1.0  # of all terms of the head under a ranking loss
    scored_weight: float = 1.0  # and under a score-based one
    box_loss: str = "giou"  # under a score-based loss; the ranking losses use GIoU
    ranking_box_weight: float = 1.0  # where the boxes are not balanced to the ranking
    scored_box_weight: float = 1.0
    l1_weight: float | None = None  # of the L1 loss of the codes beside GIoU, as DETRs have it; None: there is none
    quality_weight: float = 1.0
    prior: float = 0.5  # the probability a classifier starts with
    confident: bool = True  # whether ranking losses weigh a box by its score; otherwise all positives count alike
    least_iou: float = 0.5  # of a positive; aLRP measures localisation against it
    samples: bool = False  # whether cross-entropy trains on a balanced sample of the candidates
    softmax: bool = False  # whether cross-entropy has a background logit and a softmax


class Criterion(nn.Module):
    """The base: what a head asks before it is built, and the parts the losses share."""

    ranking = False  # a ranking loss: no sampling, no quality branch
    prior: float | None = None  # the loss's own, before the head's
    classification_terms: ClassVar[tuple[str, ...]] = ("cls",)  # the names of the terms that train the logits
    matching_focal = (0.25, 2.0)  # alpha and gamma of the class cost in Hungarian matching

    def __init__(self, settings: LossSettings, recipe: HeadRecipe) -> None:
        super().__init__()
        self.settings, self.recipe = settings, recipe
        self.scope = SCOPES[settings.ranking_scope]()
        usual = recipe.ranking_box_weight if self.ranking else recipe.scored_box_weight
        self.box_weight = usual if settings.box_weight is None else settings.box_weight
        self.box_loss = settings.box_loss or ("giou" if self.ranking else recipe.box_loss)

    @property
    def samples(self) -> bool:
        """Whether the head is to train on a sample of its candidates."""
        return False

    @property
    def softmax(self) -> bool:
        """Whether the classifier has a background logit, the last, and its classes exclude each other."""
        return False

    @property
    def initial_score(self) -> float:
        """The probability with which the head's classifier is to start."""
        return self.recipe.prior if self.prior is None else self.prior

    def scores(self, logits: Tensor) -> Tensor:
        """(R, C) scores of the classes, to rank detections by."""
        return logits.float().softmax(-1)[..., :-1] if self.softmax else logits.float().sigmoid()

    def forward(self, found: Assigned) -> Terms:
        """The terms of a head by name; their sum trains it."""
        raise NotImplementedError

    def list_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the classification loss of a plain list, for reports.

        ``logits`` and ``targets`` are (n,); a target is the IoU of a positive, 0 for a negative, -1 if ignored.
        """
        raise NotImplementedError

    def masks(self, logits: Tensor, targets: Tensor, *, confidences: Tensor, balance: Tensor) -> Tensor:
        """The mask loss of P positives; ``logits`` and ``targets`` are (P, H, W), ``confidences`` (P,).

        ``balance`` is the value of the box head's classification terms, for losses that balance themselves.
        """
        raise NotImplementedError

    def box_errors(self, found: Assigned) -> Tensor:
        """(P,) by the box loss chosen."""
        if self.box_loss == "giou":
            errors: Tensor = generalized_box_iou_loss(found.boxes, found.objects)
            return errors
        return code_errors(found, beta=1.0 if self.box_loss == "smooth_l1" else 0.0)

    def box_parts(self, found: Assigned) -> dict[str, tuple[float, Tensor]]:
        """The box losses by name: the weight of each beside the classification, and its errors (P,)."""
        parts = {"box": (self.box_weight, self.box_errors(found))}
        if self.recipe.l1_weight is not None:
            parts["l1"] = (self.recipe.l1_weight, code_errors(found, beta=0.0))
        return parts

    def mean(self, values: Tensor, weights: Tensor) -> Tensor:
        """The mean of ``values`` with ``weights``, over what is ranked together; 0 without any."""
        return self.scope.total((values * weights).sum()) / self.scope.total(weights.sum()).clamp(min=1e-10)


def code_errors(found: Assigned, *, beta: float) -> Tensor:
    """(P,) the smooth L1 distance of the codes, squared below ``beta``."""
    return F.smooth_l1_loss(found.codes, found.object_codes, reduction="none", beta=beta).sum(1)


def named(head: str, terms: Terms) -> Terms:
    """The terms of a head under its name."""
    return {f"{head}_{name}": term for name, term in terms.items()}


def confidences(logits: Tensor) -> Tensor:
    """(R,) the highest class score of each row, without gradient."""
    return logits.detach().float().sigmoid().amax(1)


def dice_errors(logits: Tensor, targets: Tensor) -> Tensor:
    """Dice loss of each of the masks (P, H, W)."""
    found, targets = logits.float().sigmoid().flatten(1), targets.float().flatten(1)
    return 1 - 2 * (found * targets).sum(1) / ((found**2).sum(1) + (targets**2).sum(1) + 1e-5)
