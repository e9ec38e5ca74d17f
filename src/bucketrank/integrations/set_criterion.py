"""Switch the criterion of a DETR-like repository to a ranking loss, in place.

The adapter imports no such repository. It relies on the protocol that their criteria share: ``losses`` names the terms,
a method ``loss_*(outputs, targets, indices, num_boxes)`` computes each term, and ``weight_dict`` weighs it.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from torch import Tensor

from bucketrank.integrations.ranking_loss import LossName, Matching, RankingLoss, Target, query_targets
from bucketrank.settings.choices import Method

Criterion = TypeVar("Criterion")
RFDETR = "rfdetr 1.8 or newer, below 2 (tested with 1.8.0, 1.10.0 and 1.11.2)"
# Name of a classification loss in criterion.losses: its method, and its key in the result.
CLASSIFICATION = {name: (f"loss_labels_{name}", f"loss_{name}") for name in ("vfl", "mal", "focal", "bce")}
CLASSIFICATION["labels"] = ("loss_labels", "loss_ce")
BOX_KEYS = ("loss_bbox", "loss_giou")  # equally long; other layers append a suffix such as "_0"
PARAMETERS = ["outputs", "targets", "indices", "num_boxes"]


class RankingMixin:
    """The methods that a criterion with a ranking loss overrides."""

    original_class: type
    classification: str
    ranking_loss: RankingLoss
    own_weights: dict[str, float]
    ranking_value: Tensor  # ranking loss of the current layer, without gradient

    def rank(self, outputs: dict[str, Tensor], targets: list[Target], indices: Matching) -> Tensor:
        """Rank all (query, class) pairs of a layer, over all images and query groups together, in float32."""
        precision = torch.promote_types(outputs["pred_logits"].dtype, torch.float32)
        logits, boxes = (outputs[key].to(precision) for key in ("pred_logits", "pred_boxes"))
        with torch.autocast(logits.device.type, enabled=False):
            labels = query_targets(self.ranking_loss, logits, boxes, targets, indices)
            ranking = torch.stack(list(self.ranking_loss.terms(logits, labels).values())).sum()
        self.ranking_value = ranking.detach()
        return ranking

    def loss_boxes(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Compute the criterion's own box losses; weigh L1 and GIoU loss by the ranking loss of the same layer."""
        losses: dict[str, Tensor] = super().loss_boxes(*args, **kwargs)  # type: ignore[misc]
        weigh, to = self.ranking_loss.weigh_box_loss, [self.ranking_value]
        return {key: weigh(value, to) if key in BOX_KEYS else value for key, value in losses.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A class created at run time cannot be imported, so a copy or pickle rebuilds it from the original class.
        own: Any = super().__reduce_ex__(max(int(protocol), 2))
        return _new_criterion, (self.original_class, self.classification), *own[2:]


def use_ranking_loss(
    criterion: Criterion,
    *,
    loss: LossName = "rs",
    method: Method = "exact",
    delta: float | None = None,
    box_weight: float | None = None,
) -> Criterion:
    """Replace the classification loss of ``criterion`` by a ranking loss; change it in place and return it.

    The ranking loss keeps the key of the replaced loss. Matching and all other losses stay. A second call replaces the
    settings.

    Args:
        criterion: a criterion with the DETR protocol.
        loss: ``"rs"`` (Rank & Sort, whose labels are the IoUs of matched boxes) or ``"ap"``.
        method: how the ranks are computed: ``"exact"``, ``"pairwise"`` or ``"bucketed"``.
        delta: logits closer than this count as partly tied; by default 0.5 for Rank & Sort and 1 for AP loss.
        box_weight: factor on the criterion's weights of L1 and GIoU loss; by default both are self-balanced per layer.
    """
    ranking_loss = RankingLoss(loss, method, delta, box_weight)
    classification = _classification("use_ranking_loss", criterion)
    changed: Any = undo(criterion) if "own_weights" in vars(criterion) else criterion
    changed.own_weights, changed.ranking_loss = changed.weight_dict, ranking_loss
    if box_weight is None:
        own, class_key, stem = changed.own_weights, CLASSIFICATION[classification][1], len(BOX_KEYS[0])
        changed.weight_dict = own | {key: own[class_key + key[stem:]] for key in own if key.startswith(BOX_KEYS)}
    changed.__class__ = _ranking_class(changed.__class__, classification)
    return criterion


def undo(criterion: Criterion) -> Criterion:
    """Restore the loss and the weights that ``criterion`` had before :func:`use_ranking_loss`, in place; return it.

    Raises ``TypeError`` for a criterion that is not supported, and ``ValueError`` for one without a ranking loss.
    """
    _classification("undo", criterion)
    changed: Any = criterion
    if "own_weights" not in vars(changed):
        got = f"{type(changed).__name__} with its own loss; call use_ranking_loss first"
        raise ValueError(f"undo: expected a criterion with a ranking loss, got {got}")
    changed.__class__, changed.weight_dict = changed.original_class, changed.own_weights
    for name in ("own_weights", "ranking_loss", "ranking_value"):
        vars(changed).pop(name, None)
    return criterion


@cache
def _ranking_class(original: Any, classification: str) -> type:
    """Create the subclass of ``original`` with the ranking loss; a method set on the instance could be bypassed."""
    method, class_key = CLASSIFICATION[classification]

    def loss_labels(self: Any, outputs: Any, targets: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():  # the original loss is only logged
            logged = getattr(original, method)(self, outputs, targets, indices, *args, **kwargs)
        return logged | {class_key: self.rank(outputs, targets, indices)}

    attributes = {method: loss_labels, "original_class": original, "classification": classification}
    return type(f"Ranking{original.__name__}", (RankingMixin, original), attributes)


def _new_criterion(original: type, classification: str) -> Any:
    return object.__new__(_ranking_class(original, classification))


def _classification(caller: str, criterion: Any) -> str:
    """Find the classification loss named in ``criterion.losses``; raise if the criterion is not supported."""

    def require(met: bool, expected: str, got: object) -> None:  # noqa: FBT001
        if not met:
            raise TypeError(f"{caller}: expected {expected}, got {got}; see docs/detr-criteria.md")

    original: Any = getattr(criterion, "original_class", type(criterion))
    losses: list[str] = list(getattr(criterion, "losses", []))
    ordered = [name for name in losses if name in CLASSIFICATION or name == "boxes"]
    one_of = f"a criterion whose losses are one of {', '.join(CLASSIFICATION)}, then boxes"
    require(ordered[1:] == ["boxes"] != ordered[:1], one_of, f"{losses} of {original.__name__}")
    require("keypoints" not in losses, "losses without keypoints", losses)
    method, class_key = CLASSIFICATION[ordered[0]]
    has_softmax = method == "loss_labels" and hasattr(criterion, "empty_weight")
    require(not has_softmax, "sigmoid scores", "a softmax with a no-object class")
    of_layers = [key[len(BOX_KEYS[0]) :] for key in criterion.weight_dict if key.startswith(BOX_KEYS)]
    for key in (class_key + layer for layer in ("", *of_layers)):
        require(key in criterion.weight_dict, f"weight_dict with {key}", list(criterion.weight_dict))
    for function in (method, "loss_boxes"):
        parameters = list(inspect.signature(getattr(original, function, object)).parameters)[1:5]
        require(parameters == PARAMETERS, f"{function}({', '.join(PARAMETERS)})", f"({', '.join(parameters)})")
    if original.__module__.startswith("rfdetr."):
        require((1, 8) <= tuple(map(int, version("rfdetr").split(".")[:2])) < (2,), RFDETR, version("rfdetr"))
    return ordered[0]
