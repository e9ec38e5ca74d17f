"""Switching a torchvision detector to a ranking loss, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.ssd import SSD

from bucketrank.integrations.ranking import Ranking
from bucketrank.integrations.torchvision.dense import RankingFCOSHead, RankingRetinaNetHead, RankingSSD
from bucketrank.integrations.torchvision.roi_heads import RankingRoIHeads
from bucketrank.integrations.torchvision.rpn import RankingRPN

Model = TypeVar("Model", bound=nn.Module)

# Which part of a model computes losses ("" is the model itself), and which part cuts detections by score.
PARTS: dict[type[nn.Module], tuple[list[str], list[str]]] = {
    FasterRCNN: (["rpn", "roi_heads"], ["rpn", "roi_heads"]),  # MaskRCNN and KeypointRCNN are subclasses
    RetinaNet: (["head"], [""]),
    FCOS: (["head"], [""]),
    SSD: ([""], [""]),
}
RANKING: dict[type[nn.Module], type[nn.Module]] = {
    RegionProposalNetwork: RankingRPN,
    RoIHeads: RankingRoIHeads,
    RetinaNetHead: RankingRetinaNetHead,
    FCOSHead: RankingFCOSHead,
    SSD: RankingSSD,
}


MEMO = "_before_ranking"  # where a model keeps what it was


@dataclass
class Before:
    """What a model was before the switch."""

    classes: list[tuple[nn.Module, type[nn.Module]]]
    thresholds: list[tuple[nn.Module, float]]


def use_ranking_loss(model: Model, *, loss: str = "rs", method: str = "exact", delta: float | None = None) -> Model:
    """Give ``model`` a ranking loss, in place: FasterRCNN, MaskRCNN, KeypointRCNN, RetinaNet, FCOS or SSD.

    ``loss`` is ``"rs"`` (Rank & Sort) or ``"ap"``; ``method`` and ``delta`` are those of the losses. The logits of all
    classes, anchors and images of a batch are ranked in one list, none sampled; boxes are trained by GIoU,
    self-balanced. In the loss dict ``<name>_rank`` and ``<name>_sort`` take the place of the classification loss.

    No parameter is changed, added or removed. Where the classifier is a softmax with background (RoI heads, SSD) the
    log-odds of its probabilities are ranked, so it predicts after the call what it predicted before. Only the score
    thresholds are set to 0: scores are ranks now, and the best k are kept.

    A second call replaces the settings. :func:`undo` takes the ranking loss away again.
    """
    ranking = Ranking(loss=loss, method=method, delta=delta)
    if MEMO in vars(model):
        undo(model)  # a part may have been replaced since: start afresh
    owners, cutters = _parts(model)
    for owner in owners:
        _check(model, owner)
    thresholds = [(part, part.score_thresh) for part in cutters]
    vars(model)[MEMO] = Before([(owner, type(owner)) for owner in owners], thresholds)
    for owner in owners:
        owner.__class__ = RANKING[type(owner)]
        owner.ranking = ranking
    for part in cutters:
        part.score_thresh = 0.0
    return model


def undo(model: Model) -> Model:
    """Give ``model`` back its own loss and its score thresholds; its parameters stay as they are."""
    if MEMO not in vars(model):
        raise ValueError(f"undo: expected a model after use_ranking_loss, got {type(model).__name__} with its own loss")
    before: Before = vars(model).pop(MEMO)
    for part, original in before.classes:
        part.__class__ = original
        del vars(part)["ranking"]
    for part, threshold in before.thresholds:
        vars(part)["score_thresh"] = threshold
    return model


def _parts(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The parts of ``model`` that compute losses and those that cut by score."""
    for known, (owners, cutters) in PARTS.items():
        if isinstance(model, known):
            return [model.get_submodule(name) for name in owners], [model.get_submodule(name) for name in cutters]
    raise TypeError(
        "use_ranking_loss: expected torchvision's FasterRCNN, MaskRCNN, KeypointRCNN, RetinaNet, FCOS or SSD, got "
        f"{type(model).__name__}; pass a wrapped model before it is wrapped, and for any other see docs/any-model.md"
    )


def _check(model: nn.Module, owner: nn.Module) -> None:
    """Raise unless ``owner`` computes torchvision's losses: of a subclass one cannot know what it computes."""
    if type(owner) not in RANKING:
        names = ", ".join(known.__name__ for known in RANKING)
        raise TypeError(
            f"use_ranking_loss: expected the losses of {type(model).__name__} in one of torchvision's own {names}, "
            f"got {type(owner).__name__}; for a loss of your own see docs/any-model.md"
        )
