"""What a head hands to the criterion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder

from bucketrank.ops.assignment import IGNORED


@dataclass(frozen=True)
class Assigned:
    """The R candidates of a batch (anchors or proposals), what was predicted for them and what they should be.

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
    labels, objects = [], []
    for match, truth in zip(matches, truths, strict=True):
        labels.append(match.clone())
        positive = torch.where(match >= 0)[0]
        labels[-1][positive] = truth["labels"][match[positive]]
        objects.append(truth["boxes"][match[positive]])
    label, wanted = torch.cat(labels), torch.cat(objects).float()
    images = torch.cat([torch.full_like(match, image) for image, match in enumerate(matches)])
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
