"""Hungarian matching: one query per object at minimal total cost (Carion et al., ECCV 2020; Zhu et al., ICLR 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bucketrank.detectors.assignment.checks import check_boxes, check_valid, without_objects

NAME = "assign_hungarian"
TINY = 1e-12  # keeps the logarithm of a probability finite


class CostWeights(NamedTuple):
    """Weights of the matching costs, and the focal parameters of the class cost."""

    classification: float  # weight of the class cost
    l1: float  # weight of the L1 distance
    giou: float  # weight of the GIoU
    alpha: float  # focal alpha
    gamma: float  # focal gamma


class ImageQueries(NamedTuple):
    """The queries of one layer and image, and the image's objects."""

    boxes: Tensor  # (Q, 4) query boxes in pixels
    objects: Tensor  # (G, 4) object boxes in pixels
    logits: Tensor  # (Q, C) class logits of the queries
    labels: Tensor  # (G,) object labels from 0
    image_size: tuple[int, int]  # height and width
    valid: Tensor | None = None  # (Q,) mask of valid queries; None: all


class QueryAssignment(NamedTuple):
    """The assignment of one entry of a batch."""

    assignment: Tensor  # (Q,) object index of each query, NEGATIVE or IGNORED
    queries: Tensor  # indices of the matched queries, ascending


@torch.no_grad()
def assign_hungarian(batch: Sequence[ImageQueries], weights: CostWeights) -> list[QueryAssignment]:
    """Assign to each object one query such that the total of :func:`matching_costs`, with ``weights``, is minimal.

    ``batch`` usually holds all layers and images of a step; each entry is matched on its own. Queries without an object
    are negative; invalid ones are ignored. If there are more objects than queries, some objects get no query.

    Computed in float32, also under autocast. If costs are not finite, the ValueError names their source. Copying the
    costs to the CPU is one device sync for the whole batch; entries with ``valid`` need another. Takes O(G^2 Q) time on
    the CPU per entry in the worst case.

    >>> boxes = torch.tensor([[0.0, 0, 4, 4], [4, 4, 8, 8], [0, 0, 8, 8]])
    >>> objects, labels = torch.tensor([[5.0, 5, 8, 8]]), torch.tensor([0])
    >>> logits = torch.zeros(3, 1)
    >>> queries = ImageQueries(boxes, objects, logits, labels, image_size=(8, 8))
    >>> weights = CostWeights(2, l1=5, giou=2, alpha=0.25, gamma=2)
    >>> assign_hungarian([queries], weights)[0].assignment
    tensor([-1,  0, -1])
    """
    import numpy as np  # imported lazily like scipy: only DETRs need them
    from scipy.optimize import linear_sum_assignment

    for each in batch:
        _check(each)
    if not batch:
        return []
    device = batch[0].boxes.device
    rows = _valid_rows(batch)
    matchable = [
        each if own is None else each._replace(boxes=each.boxes[own], logits=each.logits[own])
        for each, own in zip(batch, rows, strict=True)
    ]
    sizes = [(width, height) * 2 for height, width in (each.image_size for each in batch)]
    scales = torch.tensor(sizes, dtype=torch.float32).to(device, non_blocking=True)
    costs = [matching_costs(each, scale, weights) for each, scale in zip(matchable, scales, strict=True)]
    on_host = torch.cat([cost.flatten() for cost in costs]).cpu().split([cost.numel() for cost in costs])
    pairs = []
    for each, cost, flat in zip(matchable, costs, on_host, strict=True):
        matrix = flat.view(cost.shape).numpy()
        if not np.isfinite(matrix).all():
            raise ValueError(_not_finite(cost, each))
        pairs.append(np.stack(linear_sum_assignment(matrix)))
    owned = _to_device(pairs, device)
    assigned = []
    for each, own, (queries, owners) in zip(batch, rows, owned, strict=True):
        queries = queries if own is None else own[queries]
        assignment = without_objects(each.boxes, each.valid).index_copy_(0, queries, owners)
        assigned.append(QueryAssignment(assignment, queries))
    return assigned


def _check(queries: ImageQueries) -> None:
    boxes, objects, logits, labels, _, valid = queries
    check_boxes(NAME, boxes=boxes, objects=objects)
    check_valid(NAME, valid, (len(boxes),))
    if logits.dim() != 2 or len(logits) != len(boxes):
        raise ValueError(f"{NAME}: expected logits of shape ({len(boxes)}, classes), got {tuple(logits.shape)}")
    if labels.shape != objects.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"{NAME}: expected labels as integers of shape ({len(objects)},), one for each object, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )


def _valid_rows(batch: Sequence[ImageQueries]) -> list[Tensor | None]:
    """Find the valid query rows of each entry; None where all are valid."""
    masks = [each.valid for each in batch if each.valid is not None]
    if not masks:
        return [None] * len(batch)
    on_host = torch.cat(masks).cpu().split([len(mask) for mask in masks])
    numbers = [mask.numpy().nonzero()[0] for mask in on_host]
    rows = iter(_to_device(numbers, masks[0].device))
    return [None if each.valid is None else next(rows) for each in batch]


def _to_device(integers: Sequence[Any], device: torch.device) -> Sequence[Tensor]:
    """Copy numpy arrays, which differ only in their last dimension, to ``device`` in one transfer."""
    import numpy as np

    joined = torch.from_numpy(np.concatenate(integers, -1).astype(np.int64, copy=False))
    parts: Sequence[Tensor] = joined.to(device, non_blocking=True).split([each.shape[-1] for each in integers], -1)
    return parts


def matching_costs(queries: ImageQueries, scale: Tensor, weights: CostWeights) -> Tensor:
    """Compute the cost (Q, G) of each query for each object: weighted focal cost plus L1 distance minus GIoU.

    The focal cost is the focal loss of the object's class as a positive minus its focal loss as a negative. L1 compares
    centre and size relative to ``scale`` (4,): width, height, width and height of the image.
    """
    from torchvision.ops import box_convert, generalized_box_iou

    with torch.autocast(queries.boxes.device.type, enabled=False):
        boxes, objects = queries.boxes.float(), queries.objects.float()
        chosen = queries.logits.float()[:, queries.labels.long()]
        scores = chosen.sigmoid()
        positive = -weights.alpha * (1 - scores) ** weights.gamma * (scores + TINY).log()
        negative = -(1 - weights.alpha) * scores**weights.gamma * (1 - scores + TINY).log()
        scaled_boxes, scaled_objects = (box_convert(each / scale, "xyxy", "cxcywh") for each in (boxes, objects))
        distance: Tensor = torch.cdist(scaled_boxes, scaled_objects, p=1)
        overlap: Tensor = generalized_box_iou(boxes, objects)
        return weights.classification * (positive - negative) + weights.l1 * distance - weights.giou * overlap


def _not_finite(costs: Tensor, queries: ImageQueries) -> str:
    finite = costs.isfinite()
    inputs = {"logits": queries.logits, "boxes": queries.boxes, "objects": queries.objects}
    sources = [
        f"the {argument} of {int((~values.isfinite().all(1)).sum())} of {len(values)}"
        for argument, values in inputs.items()
        if not values.isfinite().all()
    ]
    return (
        f"{NAME}: expected finite costs, got {int((~finite).sum())} of {finite.numel()} that are not"
        f"{', from ' + ' and '.join(sources) if sources else ''}; the network has diverged: "
        "lower the learning rate, clip gradients, or train in float32 or bfloat16 instead of float16"
    )
