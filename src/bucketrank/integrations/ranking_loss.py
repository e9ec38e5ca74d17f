"""The ranking loss of the adapters: its settings and terms, the targets of positives, and the weighting of box losses.

Our own detectors share the functions for targets and box losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bucketrank.boxes import paired_iou
from bucketrank.losses import ap_loss, rank_sort_loss, self_balance
from bucketrank.losses.functional import check_choice, check_settings, format_value, is_finite_number
from bucketrank.settings.choices import DEFAULT_DELTAS, MIN_LABEL, Method

LossName = Literal["rs", "ap"]

Target = Mapping[str, Tensor]
Matching = Sequence[tuple[Tensor, Tensor]]  # per image: indices of the matched queries and of their objects


@dataclass(frozen=True)
class RankingLoss:
    """A ranking loss and its settings, as given to ``use_ranking_loss``.

    Without ``delta`` the loss uses its own default. Without ``box_weight`` the box losses are self-balanced.
    """

    loss: LossName = "rs"
    method: Method = "exact"
    delta: float | None = None
    box_weight: float | None = None

    def __post_init__(self) -> None:
        check_choice("use_ranking_loss", "loss", self.loss, get_args(LossName))
        check_settings("use_ranking_loss", self.effective_delta, self.method)
        if self.box_weight is not None and not (is_finite_number(self.box_weight) and self.box_weight >= 0):
            raise ValueError(
                "use_ranking_loss: expected box_weight to be None or a finite number of at least 0, "
                f"got {format_value(self.box_weight)}"
            )

    @property
    def effective_delta(self) -> float:
        """The ``delta`` that the loss is called with."""
        return DEFAULT_DELTAS[self.loss] if self.delta is None else self.delta

    def terms(self, logits: Tensor, targets: Tensor, *, sizes: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Compute the loss terms: ``rank``, and for Rank & Sort also ``sort``.

        With ``sizes``, the lengths of consecutive rankings, each term has one value per ranking.
        """
        settings: dict[str, Any] = {"delta": self.effective_delta, "method": self.method}
        settings |= {} if sizes is None else {"sizes": sizes, "reduction": "none"}
        if self.loss == "ap":
            return {"rank": ap_loss(logits, targets, **settings)}
        ranking, sorting = rank_sort_loss(logits, targets, **settings)
        return {"rank": ranking, "sort": sorting}

    def labels(self, ious: Tensor) -> Tensor:
        """Turn the IoUs of positives into their targets, without gradient: the IoU for Rank & Sort, 1 for AP."""
        return torch.ones_like(ious) if self.loss == "ap" else iou_labels(ious)

    def weigh_box_loss(self, box_loss: Tensor, terms: Iterable[Tensor]) -> Tensor:
        """Multiply ``box_loss`` by ``box_weight``; without a weight, self-balance it to the sum of ``terms``."""
        if self.box_weight is None:
            return self_balance(box_loss, to=torch.stack(list(terms)).sum())
        return self.box_weight * box_loss


def iou_labels(ious: Tensor, *, min_label: float = MIN_LABEL) -> Tensor:
    """Turn IoUs into labels of positives: without gradient, and at least ``min_label``."""
    return ious.detach().clamp(min=min_label)


def candidate_targets(
    logits: Tensor, values: Tensor | float, *, rows: Tensor, columns: Tensor, ignored: Tensor
) -> Tensor:
    """Build ranking targets (R, C): ``values`` (P,) at ``rows`` and ``columns``, -1 in ``ignored`` rows, else 0."""
    targets = torch.zeros_like(logits)
    targets[rows, columns] = values.to(targets.dtype) if isinstance(values, Tensor) else values
    return targets.masked_fill_(ignored[:, None], -1)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Average ``values`` with ``weights``; 0 without any."""
    return (values * weights).sum() / weights.sum().clamp(min=1e-10)


def query_targets(
    ranking_loss: RankingLoss, logits: Tensor, boxes: Tensor, targets: Sequence[Target], indices: Matching
) -> Tensor:
    """Build the targets of ``logits`` (B, Q, C): the label of each matched (query, class) pair, and 0 elsewhere.

    ``boxes`` (B, Q, 4) and ``target["boxes"]`` are relative (cx, cy, w, h). An object with ``target["valid"]`` 0 is
    padding, and the pair matched to it stays a negative.
    """
    matched = list(zip(targets, indices, strict=True))
    image = torch.cat([torch.full_like(queries, b) for b, (queries, _) in enumerate(indices)]).to(logits.device)
    query = torch.cat([queries for queries, _ in indices]).to(logits.device)
    classes = torch.cat([target["labels"][objects] for target, (_, objects) in matched])
    object_boxes = torch.cat([target["boxes"][objects] for target, (_, objects) in matched])
    labels = ranking_loss.labels(centre_size_iou(boxes.detach()[image, query], object_boxes))
    if "valid" in targets[0]:
        labels = labels * torch.cat([target["valid"][objects] for target, (_, objects) in matched])
    query_labels = torch.zeros_like(logits)
    query_labels[image, query, classes] = labels.to(query_labels.dtype)
    return query_labels


def centre_size_iou(boxes: Tensor, objects: Tensor) -> Tensor:
    """Compute the IoU of each box with the object in the same row, both (n, 4) as relative (cx, cy, w, h)."""
    return paired_iou(corners(boxes), corners(objects), min_union=torch.finfo(boxes.dtype).tiny)


def corners(boxes: Tensor) -> Tensor:
    """Convert (cx, cy, w, h) to (x1, y1, x2, y2); the adapters do not all have torchvision's ``box_convert``."""
    centres, halves = boxes[:, :2], boxes[:, 2:] / 2
    return torch.cat([centres - halves, centres + halves], 1)
