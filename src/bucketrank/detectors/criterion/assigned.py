"""What a head hands to the criterion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import box_convert

from bucketrank.ops.assignment import IGNORED


@dataclass(frozen=True)
class Assigned:
    """The R candidates of a batch (anchors, proposals or queries), what was predicted for them and what they should be.

    The rows of all images follow each other. P of them are positive; what only positives have is in their order.
    """

    logits: Tensor  # (R, C), or (R, C + 1) with a background logit last
    labels: Tensor  # (R,) the class of a positive, NEGATIVE or IGNORED
    images: Tensor  # (R,) the image a row belongs to
    boxes: Tensor  # (P, 4) predicted
    objects: Tensor  # (P, 4) the objects assigned
    codes: Tensor  # (P, 4) predicted, as the coder codes boxes
    object_codes: Tensor  # (P, 4)
    quality_logits: Tensor | None = None  # (P,) of the branch that predicts how well a box fits
    quality: Tensor | None = None  # (P,) what that branch should say

    @property
    def positives(self) -> Tensor:
        """(R,) mask."""
        return self.labels >= 0

    def targets(self, values: Tensor | float) -> Tensor:
        """(R, C) as the losses take them: ``values`` (P,) at the positives' classes, 0 elsewhere, ignored rows -1."""
        targets = torch.zeros_like(self.logits)
        rows = torch.where(self.positives)[0]
        targets[rows, self.labels[rows]] = (
            values.to(targets.dtype) if isinstance(values, Tensor) else targets.new_tensor(values)
        )
        return targets.masked_fill_((self.labels == IGNORED)[:, None], -1)


def assigned(
    logits: Tensor,
    codes: Tensor,
    *,
    candidates: Sequence[Tensor],
    matches: Sequence[Tensor],
    truths: Sequence[dict[str, Tensor]],
    coder: BoxCoder,
    quality_logits: Tensor | None = None,
) -> Assigned:
    """Put a batch together. ``logits`` is (R, C); ``codes`` (R, 4), or (R, C, 4) where every class has its box.

    For each image: ``candidates`` (A, 4), ``matches`` (A,) the object of each, NEGATIVE or IGNORED, and ``truths``, its
    objects with ``boxes`` and ``labels``, the classes counted from 0.
    """
    label, images, wanted = _wanted(matches, truths)
    rows = torch.where(label >= 0)[0]
    anchors = torch.cat(list(candidates))[rows].float()
    # Under autocast heads speak half precision; coding and ranking need the digits.
    found = (
        codes[rows, label[rows]] if codes.dim() == 3 and codes.shape[1] > 1 else codes.reshape(-1, 4)[rows]
    ).float()
    return Assigned(
        logits=logits.float(),
        labels=label,
        images=images,
        boxes=coder.decode_single(found, anchors),
        objects=wanted,
        codes=found,
        object_codes=coder.encode_single(wanted, anchors),
        quality_logits=None if quality_logits is None else quality_logits[rows].float(),
    )


def assigned_queries(
    logits: Tensor,
    boxes: Tensor,
    *,
    matches: Sequence[Tensor],
    truths: Sequence[dict[str, Tensor]],
    image_sizes: Sequence[tuple[int, int]],
) -> Assigned:
    """Put a batch of a DETR's queries together: ``logits`` (B, Q, C), ``boxes`` (B, Q, 4) and ``matches`` (Q,) of each.

    The boxes are centre and size in units of the image of (height, width); that is also how they are coded.
    """
    labels, images, objects = _wanted(matches, truths)
    rows = torch.where(labels >= 0)[0]
    scales = torch.tensor([(width, height) * 2 for height, width in image_sizes], device=boxes.device).float()
    scales = scales[images[rows]]
    found = boxes.flatten(0, 1)[rows].float()
    return Assigned(
        logits=logits.flatten(0, 1).float(),
        labels=labels,
        images=images,
        boxes=box_convert(found, "cxcywh", "xyxy") * scales,
        objects=objects,
        codes=found,
        object_codes=box_convert(objects / scales, "xyxy", "cxcywh"),
    )


def _wanted(matches: Sequence[Tensor], truths: Sequence[dict[str, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """The label and the image of every row, and the objects (P, 4) of the positives."""
    labels, objects = [], []
    for match, truth in zip(matches, truths, strict=True):
        labels.append(match.clone())
        positive = torch.where(match >= 0)[0]
        labels[-1][positive] = truth["labels"][match[positive]]
        objects.append(truth["boxes"][match[positive]])
    images = [torch.full_like(match, image) for image, match in enumerate(matches)]
    return torch.cat(labels), torch.cat(images), torch.cat(objects).float()
