"""Switch a torchvision detector to a ranking loss, and back."""

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

from bucketrank.integrations.ranking_loss import LossName, RankingLoss
from bucketrank.integrations.torchvision.heads import (
    RankingFCOSHead,
    RankingRetinaNetHead,
    RankingRoIHeads,
    RankingRPN,
    RankingSSD,
)
from bucketrank.settings.choices import Method

Model = TypeVar("Model", bound=nn.Module)

# Submodules that compute losses, and submodules with a score threshold; "" is the model itself.
SUBMODULES: dict[type[nn.Module], tuple[list[str], list[str]]] = {
    FasterRCNN: (["rpn", "roi_heads"], ["rpn", "roi_heads"]),  # MaskRCNN and KeypointRCNN are subclasses
    RetinaNet: (["head"], [""]),
    FCOS: (["head"], [""]),
    SSD: ([""], [""]),
}
RANKING_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    RegionProposalNetwork: RankingRPN,
    RoIHeads: RankingRoIHeads,
    RetinaNetHead: RankingRetinaNetHead,
    FCOSHead: RankingFCOSHead,
    SSD: RankingSSD,
}
ORIGINAL = "_before_ranking"  # model attribute that holds its Original


@dataclass
class Original:
    """The classes and score thresholds that :func:`undo` restores."""

    classes: list[tuple[nn.Module, type[nn.Module]]]
    thresholds: list[tuple[nn.Module, float]]


def use_ranking_loss(
    model: Model,
    *,
    loss: LossName = "rs",
    method: Method = "exact",
    delta: float | None = None,
    box_weight: float | None = None,
) -> Model:
    """Give ``model`` a ranking loss, in place: FasterRCNN, MaskRCNN, KeypointRCNN, RetinaNet, FCOS or SSD.

    The logits of all classes, anchors and images in a batch form one ranking, without sampling. In the loss dict
    ``<name>_rank`` and ``<name>_sort`` replace the classification loss.

    Boxes are trained with GIoU loss. By default it is self-balanced to the ranking terms of the same head, for both
    ``"rs"`` and ``"ap"``. The published code self-balances only Rank & Sort and gives AP loss a weight tuned per
    detector (2 in ATSS, 1 in PAA). A number for ``box_weight`` multiplies the GIoU loss instead of balancing it.

    No parameter is changed, added or removed. If the classifier is a softmax with background (RoI heads, SSD), the
    log-odds of its probabilities are ranked, so predictions do not change. The score thresholds are set to 0, because
    the scores become ranks; inference still keeps the top ``detections_per_img``.

    A second call replaces the settings. :func:`undo` restores the model's own loss.

    Args:
        model: a torchvision detector.
        loss: ``"rs"`` (Rank & Sort) or ``"ap"``.
        method: how the ranks are computed: ``"exact"``, ``"pairwise"`` or ``"bucketed"``.
        delta: logits closer than this count as partly tied; by default 0.5 for Rank & Sort and 1 for AP loss.
        box_weight: factor on the box losses; by default they are self-balanced.
    """
    ranking_loss = RankingLoss(loss=loss, method=method, delta=delta, box_weight=box_weight)
    _check_model("use_ranking_loss", model)
    if ORIGINAL in vars(model):
        undo(model)  # a submodule may have been replaced since the first call
    owners, thresholded = _submodules(model)
    for owner in owners:
        _check_owner(model, owner)
    thresholds = [(part, part.score_thresh) for part in thresholded]
    vars(model)[ORIGINAL] = Original([(owner, type(owner)) for owner in owners], thresholds)
    for owner in owners:
        owner.__class__ = RANKING_CLASSES[type(owner)]
        owner.ranking_loss = ranking_loss
    for part in thresholded:
        part.score_thresh = 0.0
    return model


def undo(model: Model) -> Model:
    """Restore the loss and score thresholds of ``model``, in place; the parameters keep their values.

    Raises ``TypeError`` for a model that :func:`use_ranking_loss` does not support, and ``ValueError`` for a supported
    model that has no ranking loss.
    """
    _check_model("undo", model)
    if ORIGINAL not in vars(model):
        raise ValueError(
            f"undo: expected a model with a ranking loss, got {type(model).__name__} with its own loss; "
            "call use_ranking_loss first"
        )
    original: Original = vars(model).pop(ORIGINAL)
    for part, original_class in original.classes:
        part.__class__ = original_class
        del vars(part)["ranking_loss"]
    for part, threshold in original.thresholds:
        vars(part)["score_thresh"] = threshold
    return model


def _check_model(caller: str, model: object) -> None:
    if not isinstance(model, tuple(SUBMODULES)):
        raise TypeError(
            f"{caller}: expected torchvision's FasterRCNN, MaskRCNN, KeypointRCNN, RetinaNet, FCOS or SSD, got "
            f"{type(model).__name__}; pass a wrapped model without its wrapper; for other models see docs/any-model.md"
        )


def _submodules(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """List the submodules of a supported ``model`` that compute losses, and those with a score threshold."""
    owners, thresholded = next(names for supported, names in SUBMODULES.items() if isinstance(model, supported))
    return [model.get_submodule(name) for name in owners], [model.get_submodule(name) for name in thresholded]


def _check_owner(model: nn.Module, owner: nn.Module) -> None:
    """Raise unless ``owner`` is torchvision's own class; a subclass may compute other losses."""
    if type(owner) not in RANKING_CLASSES:
        names = ", ".join(original.__name__ for original in RANKING_CLASSES)
        raise TypeError(
            f"use_ranking_loss: expected the losses of {type(model).__name__} in one of torchvision's own {names}, "
            f"got {type(owner).__name__}; for a loss of your own see docs/any-model.md"
        )
