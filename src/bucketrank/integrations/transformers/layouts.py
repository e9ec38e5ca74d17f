"""The loss of each model family, which depends on the layout of its layer outputs.

- Deformable DETR, DAB-DETR and Conditional DETR stack the layers first: ``(L, B, Q, C)``.
- RT-DETR, D-FINE and DEIMv2 stack the batch first, with DN denoising queries before the others in every layer:
  ``(B, L, DN + Q, C)``.
- LW-DETR and RF-DETR stack the layers first and hold G separately matched query groups: ``(L, B, G Q, C)``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bucketrank.integrations.ranking_loss import RankingLoss, Target
from bucketrank.integrations.transformers.criterion import (
    BOX_TERMS,
    RANKING_TERMS,
    RankingCriterion,
    weighted_sum,
)
from bucketrank.integrations.transformers.library import library_class

LossOutput = tuple[Tensor, dict[str, Tensor], list[dict[str, Tensor]] | None]  # loss, its terms, auxiliary outputs


@dataclass(frozen=True)
class LossInput:
    """The arguments that a model passes to its loss, in float32 or a wider dtype, and those of ``use_ranking_loss``."""

    ranking_loss: RankingLoss
    class_cost: float | None
    logits: Tensor
    labels: list[Target]
    boxes: Tensor
    config: Any
    layer_logits: Tensor | None  # logits of all decoder layers
    layer_boxes: Tensor | None  # boxes of all decoder layers
    extras: dict[str, Any]  # arguments that only some families pass
    proposals: tuple[Tensor, Tensor] | None  # two-stage Deformable DETR: logits and box logits of every encoder token


def detr_loss(inputs: LossInput) -> LossOutput:
    """Compute the loss of Deformable DETR, DAB-DETR and Conditional DETR."""
    library = _image_loss("loss_deformable_detr", "DeformableDetr", inputs.config)
    criterion = RankingCriterion(library, inputs.ranking_loss, inputs.class_cost)
    outputs, auxiliary = _layers_first(inputs)
    losses = library(outputs, inputs.labels)
    if inputs.proposals is not None:
        losses |= _proposal_losses(criterion, inputs.proposals, inputs.labels)
    losses = criterion.with_rankings(losses)
    return weighted_sum(losses, _weights(inputs.config, inputs.ranking_loss, class_weight=1)), losses, auxiliary


def grouped_detr_loss(inputs: LossInput) -> LossOutput:
    """Compute the loss of LW-DETR and RF-DETR."""
    config = inputs.config
    groups = inputs.logits.shape[1] // config.num_queries  # group_detr in training, 1 in evaluation
    library = _image_loss("loss_lw_detr", "LwDetr", config, groups)
    criterion = RankingCriterion(library, inputs.ranking_loss, inputs.class_cost)
    outputs, auxiliary = _layers_first(inputs)
    outputs["enc_outputs"] = _layer(inputs.extras["enc_outputs_class"], inputs.extras["enc_outputs_coord"])
    losses = criterion.with_rankings(library(outputs, inputs.labels))
    class_weight = getattr(config, "class_loss_coefficient", 1)  # transformers 5.0 has no such setting
    return weighted_sum(losses, _weights(config, inputs.ranking_loss, class_weight)), losses, auxiliary


def rt_detr_loss(inputs: LossInput) -> LossOutput:
    """Compute the loss of RT-DETR and RT-DETRv2."""
    return _denoising_detr_loss(inputs, library_class("loss_rt_detr", "RTDetrLoss"), "loss_vfl")


def d_fine_loss(inputs: LossInput) -> LossOutput:
    """Compute the loss of D-FINE."""
    return _denoising_detr_loss(_clamped(inputs), library_class("loss_d_fine", "DFineLoss"), "loss_vfl")


def deimv2_loss(inputs: LossInput) -> LossOutput:
    """Compute the loss of DEIMv2."""
    return _denoising_detr_loss(_clamped(inputs), library_class("loss_deimv2", "Deimv2Loss"), "loss_mal")


def _weights(config: Any, ranking_loss: RankingLoss, class_weight: float) -> dict[str, float]:
    """Weigh each term by the class weight; with a ``box_weight``, weigh box terms by it times the model's weight."""
    weights = dict.fromkeys((*RANKING_TERMS, *BOX_TERMS), class_weight)
    if ranking_loss.box_weight is not None:
        weights["loss_bbox"] = ranking_loss.box_weight * config.bbox_loss_coefficient
        weights["loss_giou"] = ranking_loss.box_weight * config.giou_loss_coefficient
    return weights


def _image_loss(module: str, family: str, config: Any, *groups: int) -> Any:
    """Build the library's criterion of a family, with its matcher."""
    matcher = library_class(module, f"{family}HungarianMatcher")(
        class_cost=config.class_cost, bbox_cost=config.bbox_cost, giou_cost=config.giou_cost
    )
    criterion = library_class(module, f"{family}ImageLoss")
    return criterion(matcher, config.num_labels, config.focal_alpha, ["labels", "boxes", "cardinality"], *groups)


def _layer(logits: Tensor, boxes: Tensor) -> dict[str, Tensor]:
    return {"logits": logits, "pred_boxes": boxes}


def _layers_first(inputs: LossInput) -> tuple[dict[str, Any], list[dict[str, Tensor]] | None]:
    outputs: dict[str, Any] = _layer(inputs.logits, inputs.boxes)
    if not inputs.config.auxiliary_loss or inputs.layer_logits is None or inputs.layer_boxes is None:
        return outputs, None
    auxiliary = [_layer(*layer) for layer in zip(inputs.layer_logits[:-1], inputs.layer_boxes[:-1], strict=True)]
    return outputs | {"auxiliary_outputs": auxiliary}, auxiliary


def _proposal_losses(
    criterion: RankingCriterion, proposals: tuple[Tensor, Tensor], labels: list[Target]
) -> dict[str, Tensor]:
    """Compute the losses of Deformable DETR's encoder proposals, for which transformers has no loss.

    The model keeps the tokens with the highest logit of class 0, for objects of any class. So only this logit is
    ranked, and every object gets class 0. A token on padding has infinite box logits; no object is matched to it.
    """
    logits, box_logits = proposals
    objects = [{**target, "class_labels": torch.zeros_like(target["class_labels"])} for target in labels]
    criterion.library.losses = ["labels", "boxes"]
    losses: dict[str, Tensor] = criterion.library(_layer(logits[..., :1], box_logits.sigmoid()), objects)
    return {f"{key}_enc": value for key, value in losses.items()}


def _clamped(inputs: LossInput) -> LossInput:
    """Clamp the boxes to the image, as D-FINE and DEIMv2 do before their loss."""
    extras = dict(inputs.extras)
    if extras.get("enc_topk_bboxes") is not None:
        extras["enc_topk_bboxes"] = extras["enc_topk_bboxes"].clamp(0, 1)
    layer_boxes = None if inputs.layer_boxes is None else inputs.layer_boxes.clamp(0, 1)
    return replace(inputs, boxes=inputs.boxes.clamp(0, 1), layer_boxes=layer_boxes, extras=extras)


def _denoising_detr_loss(inputs: LossInput, library_criterion: Any, classification: str) -> LossOutput:
    ranking_loss = inputs.ranking_loss
    criterion = RankingCriterion(library_criterion(inputs.config), ranking_loss, inputs.class_cost)
    weights = criterion.library.weight_dict  # these criteria apply their weights themselves
    if ranking_loss.box_weight is not None:
        weights |= {term: ranking_loss.box_weight * weights[term] for term in BOX_TERMS}
    denoising = inputs.extras.get("denoising_meta_values")
    counts = None if denoising is None else denoising["dn_num_split"]  # denoising queries, other queries
    logits, boxes = (t if counts is None else t.split(counts, 1)[1] for t in (inputs.logits, inputs.boxes))
    outputs: dict[str, Any] = _layer(logits, boxes)
    auxiliary = None
    if inputs.config.auxiliary_loss:
        stacks = {
            "logits": inputs.layer_logits,
            "pred_boxes": inputs.layer_boxes,
            "pred_corners": inputs.extras.get("predicted_corners"),
            "ref_points": inputs.extras.get("initial_reference_points"),
        }
        present = {name: stack for name, stack in stacks.items() if stack is not None}
        queries = present if counts is None else {n: stack.split(counts, 2)[1] for n, stack in present.items()}
        encoder = _layer(inputs.extras["enc_topk_logits"], inputs.extras["enc_topk_bboxes"])
        auxiliary = [*_unstacked(queries)[:-1], encoder]
        outputs["auxiliary_outputs"] = auxiliary
        if counts is not None:
            denoised = {n: stack.split(counts, 2)[0] for n, stack in present.items()}
            outputs |= {"dn_auxiliary_outputs": _unstacked(denoised), "denoising_meta_values": denoising}
    losses = criterion.with_rankings(criterion.library(outputs, inputs.labels), weight=weights[classification])
    return torch.stack(list(losses.values())).sum(), losses, auxiliary


def _unstacked(stacks: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split stacks (B, L, ...) into L layers, aligned at the last layer.

    D-FINE and DEIMv2 make one more prediction before their first layer, without box-edge distributions, so the
    distribution stacks are shorter by one. The last layer's distributions are targets for the other layers.
    """
    teacher = {}
    if "pred_corners" in stacks:
        teacher = {"teacher_corners": stacks["pred_corners"][:, -1], "teacher_logits": stacks["logits"][:, -1]}
    layers = []
    for from_end in range(stacks["logits"].shape[1], 0, -1):
        layer = {name: stack[:, -from_end] for name, stack in stacks.items() if from_end <= stack.shape[1]}
        layers.append(layer | teacher if "pred_corners" in layer else layer)
    return layers
