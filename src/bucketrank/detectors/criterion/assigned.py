"""The input of a criterion: the candidates of a batch with their predictions and the objects assigned to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import box_convert

from bucketrank.ops.assignment import IGNORED
from bucketrank.ops.boxes import paired_iou

# The target of a positive whose box does not overlap its object. It must exceed 0, the target of a negative.
SMALLEST_LABEL = 1e-6

# The targets (P,) of the quality branch, from the anchors, predicted boxes and objects of P positives.
Quality = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Assigned:
    """The R candidates of a batch (anchors, proposals or queries) with their predictions and targets.

    The rows of all images follow each other. P rows are positive; tensors of P rows keep the order of the positives.
    The deltas are what the head regresses: a box relative to its candidate, as ``BoxCoder`` encodes it, or for a DETR's
    queries the box itself as (cx, cy, w, h) in units of the image.
    """

    logits: Tensor  # (R, C), or (R, C + 1) with the background logit last
    labels: Tensor  # (R,) the class of a positive, NEGATIVE or IGNORED
    image_index: Tensor  # (R,) the image that a row belongs to
    boxes: Tensor  # (P, 4) the predicted boxes
    objects: Tensor  # (P, 4) the boxes of the assigned objects
    box_deltas: Tensor  # (P, 4) the predicted deltas
    target_deltas: Tensor  # (P, 4) the deltas of the assigned objects
    quality_logits: Tensor | None = None  # (P,) of the branch that predicts how well a box fits
    quality_targets: Tensor | None = None  # (P,) from 0 to 1
    positive_rows: Tensor | None = None  # (P,) if known; otherwise ``rows`` finds them, for which the host waits

    @property
    def positives(self) -> Tensor:
        """(R,) whether each row is positive."""
        return self.labels >= 0

    @cached_property
    def rows(self) -> Tensor:
        """(P,) the rows of the positives."""
        return torch.where(self.positives)[0] if self.positive_rows is None else self.positive_rows

    def targets(self, values: Tensor | float) -> Tensor:
        """Return targets (R, C) for a loss: ``values`` (P,) at the positives' classes, -1 in ignored rows, else 0."""
        targets = torch.zeros_like(self.logits)
        targets[self.rows, self.labels[self.rows]] = values.to(targets.dtype) if isinstance(values, Tensor) else values
        return targets.masked_fill_((self.labels == IGNORED)[:, None], -1)

    @cached_property
    def ious(self) -> Tensor:
        """(P,) the IoU of each positive's box with its object, without gradient, at least SMALLEST_LABEL."""
        return paired_iou(self.boxes.detach(), self.objects).clamp(min=SMALLEST_LABEL)

    @classmethod
    def from_candidates(
        cls,
        logits: Tensor,
        box_deltas: Tensor,
        *,
        candidates: Sequence[Tensor],
        matches: Sequence[Tensor],
        ground_truths: Sequence[dict[str, Tensor]],
        coder: BoxCoder,
        quality_logits: Tensor | None = None,
        quality: Quality | None = None,
    ) -> Assigned:
        """Build the input of a criterion from anchors or proposals.

        ``logits`` is (R, C); ``box_deltas`` is (R, 4), or (R, C, 4) with one box per class. Per image, ``candidates``
        is (A, 4) and ``matches`` (A,) holds the object of each candidate, NEGATIVE or IGNORED. ``ground_truths`` holds
        one dict per image with ``boxes`` and ``labels``; classes count from 0. ``quality_logits`` (R,) of the quality
        branch come with ``quality``, which computes their targets.
        """
        labels, image_index, rows, objects = _targets_of(matches, ground_truths)
        anchors = torch.cat(list(candidates))[rows].float()
        # Heads return half precision under autocast; decoding and ranking need float32.
        per_class = box_deltas.dim() == 3 and box_deltas.shape[1] > 1
        deltas = (box_deltas[rows, labels[rows]] if per_class else box_deltas.reshape(-1, 4)[rows]).float()
        boxes = coder.decode_single(deltas, anchors)
        return cls(
            logits=logits.float(),
            labels=labels,
            image_index=image_index,
            boxes=boxes,
            objects=objects,
            box_deltas=deltas,
            target_deltas=coder.encode_single(objects, anchors),
            quality_logits=None if quality_logits is None else quality_logits[rows].float(),
            quality_targets=None if quality is None else quality(anchors, boxes.detach(), objects),
            positive_rows=rows,
        )

    @classmethod
    def from_queries(
        cls,
        layers: Sequence[tuple[Tensor, Tensor]],
        *,
        matches: Sequence[Tensor],
        ground_truths: Sequence[dict[str, Tensor]],
        scales: Tensor,
        rows: Tensor | None = None,
    ) -> list[Assigned]:
        """Build the inputs of a criterion from the layers of a DETR's decoder, all with the same ``matches``.

        A layer is its logits (B, Q, C) and its boxes (B, Q, 4) as (cx, cy, w, h) in units of the image. Per image,
        ``matches`` is (Q,) and ``scales`` (B, 4) holds width, height, width and height. ``rows`` (P,) are the positive
        rows if they are known; otherwise the host waits for them.
        """
        labels, image_index, rows, objects = _targets_of(matches, ground_truths, rows)
        scales = scales[image_index[rows]]
        target_deltas = box_convert(objects / scales, "xyxy", "cxcywh")
        assigned = []
        for logits, boxes in layers:
            relative_boxes = boxes.flatten(0, 1)[rows].float()
            assigned.append(
                cls(
                    logits=logits.flatten(0, 1).float(),
                    labels=labels,
                    image_index=image_index,
                    boxes=box_convert(relative_boxes, "cxcywh", "xyxy") * scales,
                    objects=objects,
                    box_deltas=relative_boxes,
                    target_deltas=target_deltas,
                    positive_rows=rows,
                )
            )
        return assigned


def _targets_of(
    matches: Sequence[Tensor], ground_truths: Sequence[dict[str, Tensor]], rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the label (R,) and the image (R,) of every row, the positive rows (P,) and their objects (P, 4)."""
    image_index = torch.cat([torch.full_like(match, image) for image, match in enumerate(matches)])
    labels = torch.cat(list(matches))
    if rows is None:
        rows = torch.where(labels >= 0)[0]  # the host waits here, and only here
    first, numbers = 0, []  # objects are numbered through the images
    for match, ground_truth in zip(matches, ground_truths, strict=True):
        numbers.append(match + first)
        first += len(ground_truth["labels"])
    owners = torch.cat(numbers)[rows]
    labels[rows] = torch.cat([ground_truth["labels"] for ground_truth in ground_truths])[owners]
    objects = torch.cat([ground_truth["boxes"] for ground_truth in ground_truths])[owners]
    return labels, image_index, rows, objects.float()
