"""How the families of models hand their layers to the loss.

There are three ways. The DETRs stack the layers first, ``(L, B, Q, C)``. RT-DETR and its kin stack the batch first and
put the denoising queries before the others in every layer, ``(B, L, DN + Q, C)``. LW-DETR and RF-DETR stack as the
DETRs do and hold several groups of queries, ``(L, B, G Q, C)``, each matched by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bucketrank.integrations.ranking import Ranking
from bucketrank.integrations.transformers.criterion import RANKED, Target, balance, rank_instead, total
from bucketrank.integrations.transformers.library import library_class

Result = tuple[Tensor, dict[str, Tensor], list[dict[str, Tensor]] | None]


@dataclass(frozen=True)
class Settings:
    """What the user chose."""

    ranking: Ranking
    class_cost: float | None


@dataclass(frozen=True)
class Call:
    """The arguments with which a model calls its loss, in float32 or better."""

    logits: Tensor
    labels: list[Target]
    boxes: Tensor
    config: Any
    classes: Tensor | None  # of all layers
    coordinates: Tensor | None
    more: dict[str, Any]
    proposals: tuple[Tensor, Tensor] | None  # of Deformable DETR's encoder: logits and box logits of every token


def detr(call: Call, settings: Settings) -> Result:
    """Deformable DETR, DAB-DETR, Conditional DETR."""
    criterion = rank_instead(_detr_criterion(call.config), settings.ranking, settings.class_cost)
    outputs, auxiliary = _layer_first(call)
    losses = criterion(outputs, call.labels)
    if call.proposals is not None:
        losses |= _two_stage(criterion, call.proposals, call.labels)
    losses = balance(losses)
    return total(losses, weight=1), losses, auxiliary


def grouped(call: Call, settings: Settings) -> Result:
    """LW-DETR, RF-DETR."""
    config = call.config
    groups = call.logits.shape[1] // config.num_queries  # group_detr in training, 1 in evaluation
    matcher = library_class("loss_lw_detr", "LwDetrHungarianMatcher")(
        class_cost=config.class_cost, bbox_cost=config.bbox_cost, giou_cost=config.giou_cost
    )
    criterion = rank_instead(
        library_class("loss_lw_detr", "LwDetrImageLoss")(
            matcher, config.num_labels, config.focal_alpha, ["labels", "boxes", "cardinality"], groups
        ),
        settings.ranking,
        settings.class_cost,
    )
    outputs, auxiliary = _layer_first(call)
    outputs["enc_outputs"] = _layer(call.more["enc_outputs_class"], call.more["enc_outputs_coord"])
    losses = balance(criterion(outputs, call.labels))
    weight = getattr(config, "class_loss_coefficient", 1)  # transformers 5.0 did not have it
    return total(losses, weight=weight), losses, auxiliary


def rt_detr(call: Call, settings: Settings) -> Result:
    """RT-DETR and RT-DETRv2."""
    return _denoised(call, settings, library_class("loss_rt_detr", "RTDetrLoss"), "loss_vfl")


def d_fine(call: Call, settings: Settings) -> Result:
    """D-FINE."""
    return _denoised(_inside(call), settings, library_class("loss_d_fine", "DFineLoss"), "loss_vfl")


def deimv2(call: Call, settings: Settings) -> Result:
    """DEIMv2."""
    return _denoised(_inside(call), settings, library_class("loss_deimv2", "Deimv2Loss"), "loss_mal")


def _detr_criterion(config: Any) -> Any:
    matcher = library_class("loss_deformable_detr", "DeformableDetrHungarianMatcher")(
        class_cost=config.class_cost, bbox_cost=config.bbox_cost, giou_cost=config.giou_cost
    )
    criterion = library_class("loss_deformable_detr", "DeformableDetrImageLoss")
    return criterion(matcher, config.num_labels, config.focal_alpha, ["labels", "boxes", "cardinality"])


def _layer(logits: Tensor, boxes: Tensor, **more: Tensor) -> dict[str, Tensor]:
    return {"logits": logits, "pred_boxes": boxes, **more}


def _layer_first(call: Call) -> tuple[dict[str, Any], list[dict[str, Tensor]] | None]:
    outputs: dict[str, Any] = _layer(call.logits, call.boxes)
    if not call.config.auxiliary_loss or call.classes is None or call.coordinates is None:
        return outputs, None
    auxiliary = [_layer(*layer) for layer in zip(call.classes[:-1], call.coordinates[:-1], strict=True)]
    return outputs | {"auxiliary_outputs": auxiliary}, auxiliary


def _two_stage(criterion: Any, proposals: tuple[Tensor, Tensor], labels: list[Target]) -> dict[str, Tensor]:
    """The encoder's proposals of Deformable DETR, for which transformers has no loss at all.

    The model keeps the tokens with the highest logit of class 0, whatever they show: so that one is ranked, and every
    object is of class 0. A token on padding has box logits of infinity, a box no object is matched to.
    """
    logits, boxes = proposals
    objects = [{**target, "class_labels": torch.zeros_like(target["class_labels"])} for target in labels]
    criterion.losses = ["labels", "boxes"]
    losses = criterion(_layer(logits[..., :1], boxes.sigmoid()), objects)
    return {f"{key}_enc": value for key, value in losses.items()}


def _inside(call: Call) -> Call:
    """Boxes clamped to the image, as D-FINE and DEIMv2 do before their loss."""
    more = dict(call.more)
    if more.get("enc_topk_bboxes") is not None:
        more["enc_topk_bboxes"] = more["enc_topk_bboxes"].clamp(0, 1)
    coordinates = None if call.coordinates is None else call.coordinates.clamp(0, 1)
    return Call(
        call.logits, call.labels, call.boxes.clamp(0, 1), call.config, call.classes, coordinates, more, call.proposals
    )


def _denoised(call: Call, settings: Settings, library: Any, classification: str) -> Result:
    criterion = rank_instead(library(call.config), settings.ranking, settings.class_cost)
    # The criterion weighs its terms itself.
    criterion.weight_dict |= dict.fromkeys(RANKED, criterion.weight_dict[classification])
    meta = call.more.get("denoising_meta_values")
    counts = None if meta is None else meta["dn_num_split"]
    logits, boxes = (t if counts is None else t.split(counts, 1)[1] for t in (call.logits, call.boxes))
    outputs: dict[str, Any] = _layer(logits, boxes)
    auxiliary = None
    if call.config.auxiliary_loss:
        stacks = {
            "logits": call.classes,
            "pred_boxes": call.coordinates,
            "pred_corners": call.more.get("predicted_corners"),
            "ref_points": call.more.get("initial_reference_points"),
        }
        given = {name: stack for name, stack in stacks.items() if stack is not None}
        queries = given if counts is None else {n: stack.split(counts, 2)[1] for n, stack in given.items()}
        encoder = _layer(call.more["enc_topk_logits"], call.more["enc_topk_bboxes"])
        auxiliary = [*_batch_first(queries)[:-1], encoder]
        outputs["auxiliary_outputs"] = auxiliary
        if counts is not None:
            denoised = {n: stack.split(counts, 2)[0] for n, stack in given.items()}
            outputs |= {"dn_auxiliary_outputs": _batch_first(denoised), "denoising_meta_values": meta}
    losses = balance(criterion(outputs, call.labels))
    return torch.stack(list(losses.values())).sum(), losses, auxiliary


def _batch_first(stacks: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The layers of stacks (B, L, ...), told apart from the last.

    D-FINE and DEIMv2 predict once more, ahead of their first layer, and that without the distributions of box edges:
    stacks of those are shorter by one. The distributions of the last layer teach those of the others.
    """
    taught = {}
    if "pred_corners" in stacks:
        taught = {"teacher_corners": stacks["pred_corners"][:, -1], "teacher_logits": stacks["logits"][:, -1]}
    layers = []
    for back in range(stacks["logits"].shape[1], 0, -1):
        layer = {name: stack[:, -back] for name, stack in stacks.items() if back <= stack.shape[1]}
        layers.append(layer | taught if "pred_corners" in layer else layer)
    return layers
