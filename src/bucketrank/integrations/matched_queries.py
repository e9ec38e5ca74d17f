"""Ranking targets of a Hungarian matching, for the adapters of detection transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bucketrank.integrations.ranking_loss import RankingLoss
from bucketrank.ops.boxes import paired_iou

Target = Mapping[str, Tensor]
Matching = Sequence[tuple[Tensor, Tensor]]  # per image: the indices of matched queries and of their objects


def query_targets(
    ranking_loss: RankingLoss,
    logits: Tensor,
    boxes: Tensor,
    targets: Sequence[Target],
    indices: Matching,
    *,
    class_key: str,
) -> Tensor:
    """Return the targets of ``logits`` (B, Q, C): the label of each matched (query, class) pair, and 0 elsewhere.

    ``boxes`` (B, Q, 4) and ``target["boxes"]`` are relative (cx, cy, w, h). An object with ``target["valid"]`` 0 is
    padding, and the pair matched to it stays a negative.
    """
    matched = list(zip(targets, indices, strict=True))
    image = torch.cat([torch.full_like(queries, b) for b, (queries, _) in enumerate(indices)]).to(logits.device)
    query = torch.cat([queries for queries, _ in indices]).to(logits.device)
    classes = torch.cat([target[class_key][objects] for target, (_, objects) in matched])
    object_boxes = torch.cat([target["boxes"][objects] for target, (_, objects) in matched])
    labels = ranking_loss.labels(centre_size_iou(boxes.detach()[image, query], object_boxes))
    if "valid" in targets[0]:
        labels = labels * torch.cat([target["valid"][objects] for target, (_, objects) in matched])
    query_labels = torch.zeros_like(logits)
    query_labels[image, query, classes] = labels.to(query_labels.dtype)
    return query_labels


def centre_size_iou(boxes: Tensor, objects: Tensor) -> Tensor:
    """Return the IoU of each box with the object in the same row, both (n, 4) as relative (cx, cy, w, h)."""
    return paired_iou(corners(boxes), corners(objects), smallest_union=torch.finfo(boxes.dtype).tiny)


def corners(boxes: Tensor) -> Tensor:
    """Convert (cx, cy, w, h) to (x1, y1, x2, y2); the adapters do not all have torchvision's ``box_convert``."""
    centres, sizes = boxes[:, :2], boxes[:, 2:]
    return torch.cat([centres - sizes / 2, centres + sizes / 2], 1)
