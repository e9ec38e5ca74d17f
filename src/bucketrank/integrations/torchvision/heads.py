"""torchvision heads with a ranking loss: RetinaNet, FCOS, SSD, the RPN and the RoI heads, and the parts they share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.ssd import SSD
from torchvision.ops import generalized_box_iou_loss

from bucketrank.boxes import paired_iou
from bucketrank.integrations.ranking_loss import RankingLoss, candidate_targets, weighted_mean

Targets = list[dict[str, Tensor]]

BACKGROUND, IGNORED = -1, -2  # the values of torchvision's Matcher
RPN_WEIGHT = 0.2  # factor on all RPN terms, as in the published recipes


def relative_boxes(coder: BoxCoder, deltas: Tensor) -> Tensor:
    """Decode box deltas (P, 4) against the unit box, so that each box is relative to its own anchor.

    IoU and GIoU do not change when both boxes are shifted and scaled together. So a prediction and a target that are
    encoded against the same anchor can be compared without the anchor.
    """
    deltas = deltas.float()
    boxes: Tensor = coder.decode_single(deltas, deltas.new_tensor([0, 0, 1, 1]).expand(len(deltas), 4))
    return boxes


def log_odds(logits: Tensor) -> Tensor:
    """Compute the log-odds of the softmax, ``s_c = z_c - log sum_{k != c} exp z_k``: ``sigmoid(s) = softmax(z)``.

    The cost is O(C) per row. Both branches avoid cancellation: a probability p of at most 1/2 gives
    ``log p - log(1 - p)``. Only the largest logit of a row can have p above 1/2; its sum over the other classes is
    computed explicitly.

    >>> z = torch.tensor([[1.0, 2.0, 40.0]])
    >>> log_odds(z)  # the last: 40 - log(e^1 + e^2)
    tensor([[-39.0000, -38.0000,  37.6867]])
    """
    logits = logits.float()
    top = logits.argmax(-1, keepdim=True)
    is_top = torch.arange(logits.shape[-1], device=logits.device) == top
    others = logits.masked_fill(is_top, float("-inf")).logsumexp(-1, keepdim=True)
    log_p = logits.log_softmax(-1).masked_fill(is_top, -1.0)  # a dummy with a finite gradient: `where` discards it
    return torch.where(is_top, logits - others, log_p - torch.log1p(-log_p.exp()))


def check_label_shapes(targets: Targets) -> None:
    """Raise unless every box has one label."""
    for index, target in enumerate(targets):
        if "labels" not in target:
            got = ", ".join(target)
            raise ValueError(
                f"use_ranking_loss: expected labels in every target, got {got} in target {index}; add them"
            )
        if target["labels"].shape != target["boxes"].shape[:1]:
            raise ValueError(
                f"use_ranking_loss: expected labels of shape ({len(target['boxes'])},), one for each box, got "
                f"{tuple(target['labels'].shape)} in target {index}; correct the targets"
            )


def check_labels(targets: Targets, *, first: int, last: int) -> None:
    """Raise unless every box has one label, from ``first`` to ``last``.

    The check costs one device sync. torchvision itself syncs several times in the same step.
    """
    check_label_shapes(targets)
    labels = torch.cat([target["labels"] for target in targets])
    if labels.numel() == 0:
        return
    lowest, highest = torch.stack(labels.aminmax()).tolist()
    if first <= lowest and highest <= last:
        return
    background = " (0 is the background)" if first else ""
    wrong = lowest if not lowest >= first else highest
    raise ValueError(
        f"use_ranking_loss: expected labels from {first} to {last}{background}, got {wrong}; "
        "correct the targets, or build the model with more classes"
    )


def head_terms(
    ranking_loss: RankingLoss, logits: Tensor, labels: Tensor, *, boxes: Tensor, objects: Tensor
) -> dict[str, Tensor]:
    """Compute ``rank``, ``sort`` (Rank & Sort only) and ``box`` for R candidates, P of which are positives.

    ``logits`` is (R, C). ``labels`` (R,) holds a column of ``logits``, ``BACKGROUND`` or ``IGNORED``. ``boxes`` (P, 4)
    are the predicted boxes of the positives, in the order of ``labels``, and ``objects`` (P, 4) their ground truth.
    The box term is the mean GIoU loss, weighted by the confidence of the positives. It is then self-balanced to the
    ranking terms, or multiplied by ``box_weight`` if that is set.
    """
    positives = torch.where(labels >= 0)[0]
    boxes, objects = boxes.float(), objects.float()

    targets = candidate_targets(
        logits.detach().float(),
        ranking_loss.labels(paired_iou(boxes, objects)),
        rows=positives,
        columns=labels[positives],
        ignored=labels == IGNORED,
    )
    terms = ranking_loss.terms(logits, targets)

    confidences = logits[positives].detach().float().sigmoid().amax(1)
    box_loss = weighted_mean(generalized_box_iou_loss(boxes, objects), confidences)
    return terms | {"box": ranking_loss.weigh_box_loss(box_loss, terms.values())}


def named(terms: dict[str, Tensor], scores: str, boxes: str, *, weight: float = 1.0) -> dict[str, Tensor]:
    """Rename the terms to ``<scores>_rank``, ``<scores>_sort`` and ``<boxes>``, each multiplied by ``weight``."""
    return {boxes if name == "box" else f"{scores}_{name}": weight * term for name, term in terms.items()}


def dense_terms(
    ranking_loss: RankingLoss,
    targets: Targets,
    head_outputs: dict[str, Tensor],
    anchors: list[Tensor],
    matches: list[Tensor],
    *,
    decode: Callable[[Tensor, Tensor], Tensor],
    background: bool = False,
) -> dict[str, Tensor]:
    """Compute the loss terms of B images with A anchors each: all anchors and classes form one ranking.

    ``matches`` (A,) holds the object of each anchor, BACKGROUND or IGNORED. ``decode`` turns box deltas and anchors
    (P, 4) of the positives into boxes. With ``background`` the logits are those of a softmax whose class 0 it is.
    """
    logits = head_outputs["cls_logits"]
    check_labels(targets, first=int(background), last=logits.shape[-1] - 1)
    columns = torch.stack(matches)  # (B, A)
    positives = columns >= 0
    matched = [(target, match[match >= 0]) for target, match in zip(targets, matches, strict=True)]
    labels = torch.cat([target["labels"][objects] for target, objects in matched])
    columns[positives] = labels.to(columns.dtype) - int(background)
    objects = torch.cat([target["boxes"][objects] for target, objects in matched])
    boxes = decode(head_outputs["bbox_regression"][positives].float(), torch.stack(anchors)[positives])
    logits = log_odds(logits)[..., 1:] if background else logits
    terms = head_terms(ranking_loss, logits.flatten(0, 1), columns.flatten(), boxes=boxes, objects=objects)
    return named(terms, "classification", "bbox_regression")


class RankingRetinaNetHead(RetinaNetHead):
    """``RetinaNetHead`` with a ranking loss."""

    ranking_loss: RankingLoss

    def compute_loss(
        self, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> dict[str, Tensor]:
        decode = self.regression_head.box_coder.decode_single
        return dense_terms(self.ranking_loss, targets, head_outputs, anchors, matched_idxs, decode=decode)


class RankingFCOSHead(FCOSHead):
    """``FCOSHead`` with a ranking loss. Inference multiplies scores by the centerness, which keeps its own loss."""

    ranking_loss: RankingLoss

    def compute_loss(
        self, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> dict[str, Tensor]:
        decode = self.box_coder.decode
        terms = dense_terms(self.ranking_loss, targets, head_outputs, anchors, matched_idxs, decode=decode)
        # Only the parent's centerness loss is used. The other outputs are detached to save their graph.
        outputs = {name: value if name == "bbox_ctrness" else value.detach() for name, value in head_outputs.items()}
        own = super().compute_loss(targets, outputs, anchors, matched_idxs)
        return terms | {"bbox_ctrness": own["bbox_ctrness"]}


class RankingSSD(SSD):
    """``SSD`` with a ranking loss over the log-odds of its softmax, and without hard negative mining."""

    ranking_loss: RankingLoss

    def compute_loss(
        self, targets: Targets, head_outputs: dict[str, Tensor], anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> dict[str, Tensor]:
        decode = self.box_coder.decode_single
        return dense_terms(
            self.ranking_loss, targets, head_outputs, anchors, matched_idxs, decode=decode, background=True
        )


class RankingRPN(RegionProposalNetwork):
    """``RegionProposalNetwork`` with one ranking over all anchors of the batch, without sampling."""

    ranking_loss: RankingLoss

    def compute_loss(
        self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        anchor_labels = torch.cat(labels)  # 1 object, 0 background, -1 ignored
        columns = torch.zeros_like(anchor_labels, dtype=torch.int64).masked_fill(anchor_labels == 0, BACKGROUND)
        columns = columns.masked_fill(anchor_labels < 0, IGNORED)
        positives = torch.where(columns >= 0)[0]
        boxes = relative_boxes(self.box_coder, pred_bbox_deltas[positives])
        objects = relative_boxes(self.box_coder, torch.cat(regression_targets)[positives])
        terms = head_terms(self.ranking_loss, objectness.reshape(-1, 1), columns, boxes=boxes, objects=objects)
        return terms, terms["box"]

    def forward(
        self, images: ImageList, features: dict[str, Tensor], targets: Targets | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        boxes, losses = super().forward(images, features, targets)
        if losses:  # the parent stores the terms from compute_loss as "loss_objectness"
            losses = named(losses["loss_objectness"], "loss_objectness", "loss_rpn_box_reg", weight=RPN_WEIGHT)
        return boxes, losses


class RankingRoIHeads(RoIHeads):
    """``RoIHeads`` with one ranking over all proposals, objects and classes of the batch, without sampling.

    The classifier stays a softmax with background. The sigmoid of a class's log-odds equals its softmax probability,
    so ranking the log-odds ranks the inference scores, and the parent's post-processing needs no change.
    """

    ranking_loss: RankingLoss
    proposal_targets: tuple[Tensor, Tensor]  # labels (R,) and target deltas (R, 4) of the current batch's proposals

    def subsample(self, labels: list[Tensor]) -> list[Tensor]:
        return [torch.where(image_labels >= 0)[0] for image_labels in labels]

    def select_training_samples(
        self, proposals: list[Tensor], targets: Targets | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        proposals, matches, labels, deltas = super().select_training_samples(proposals, targets)
        self.proposal_targets = torch.cat(labels), torch.cat(deltas)
        # The returned labels choose the proposals for the mask and keypoint heads, which keep the parent's limit.
        limit = int(self.fg_bg_sampler.batch_size_per_image * self.fg_bg_sampler.positive_fraction)
        return proposals, matches, [limit_positives(image_labels, limit) for image_labels in labels], deltas

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: Targets | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        if not self.training:
            result, losses = super().forward(features, proposals, image_shapes, targets)
            return result, losses

        check_label_shapes(targets or [])  # must run before the parent uses the labels
        # The parent's box loss is a module-level function, which cannot be overridden. Let the parent compute it,
        # discard it, and rank the predictor outputs instead.
        predictions: list[tuple[Tensor, Tensor]] = []

        def keep_outputs(_module: nn.Module, _inputs: object, outputs: tuple[Tensor, Tensor]) -> None:
            # Check now: the parent's loss fails for a label beyond the last class and treats label 0 as background.
            check_labels(targets or [], first=1, last=outputs[0].shape[1] - 1)
            predictions.append(outputs)

        hook = self.box_predictor.register_forward_hook(keep_outputs)
        try:
            result, losses = super().forward(features, proposals, image_shapes, targets)
            box_losses = self.box_losses(*predictions[0], *self.proposal_targets)
        finally:
            hook.remove()
            self.__dict__.pop("proposal_targets", None)
        others = {name: loss for name, loss in losses.items() if name not in {"loss_classifier", "loss_box_reg"}}
        return result, box_losses | others

    def box_losses(self, logits: Tensor, deltas: Tensor, labels: Tensor, target_deltas: Tensor) -> dict[str, Tensor]:
        """Compute the losses of R proposals.

        ``logits`` is (R, 1 + C), ``deltas`` (R, 4 + 4C), ``labels`` (R,) with 0 for background, ``target_deltas``
        (R, 4).
        """
        positives = torch.where(labels > 0)[0]
        deltas = deltas.reshape(len(deltas), -1, 4)[positives, labels[positives]]  # deltas of the object's class
        terms = head_terms(
            self.ranking_loss,
            log_odds(logits)[:, 1:],
            labels - 1,  # background becomes -1
            boxes=relative_boxes(self.box_coder, deltas),
            objects=relative_boxes(self.box_coder, target_deltas[positives]),
        )
        return named(terms, "loss_classifier", "loss_box_reg")


def limit_positives(labels: Tensor, limit: int) -> Tensor:
    """Keep at most ``limit`` positives, chosen at random; the other positives become background."""
    positives = torch.where(labels > 0)[0]
    dropped = positives[torch.randperm(len(positives), device=labels.device)[limit:]]
    return labels.index_fill(0, dropped, 0)
