"""One query per object, at the lowest total cost (Carion et al., ECCV 2020; Zhu et al., ICLR 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bucketrank.detectors.assignment.checks import check_boxes, check_valid, without_objects

NAME = "assign_hungarian"  # in error messages
TINY = 1e-12  # keeps the logarithm of a probability finite


class CostWeights(NamedTuple):
    """Weights of the three matching costs, and focal loss's ``alpha`` and ``gamma``."""

    classification: float
    l1: float
    giou: float
    alpha: float
    gamma: float


class ImageQueries(NamedTuple):
    """The queries of one layer and image with the objects that they may be assigned to.

    ``boxes`` is (Q, 4), ``objects`` (G, 4), both in pixels; ``logits`` is (Q, C), ``labels`` (G,), ``valid`` (Q,).
    """

    boxes: Tensor
    objects: Tensor
    logits: Tensor
    labels: Tensor
    image_size: tuple[int, int]
    valid: Tensor | None = None


class QueryAssignment(NamedTuple):
    """The object (Q,) of each query, NEGATIVE or IGNORED; and the queries that have an object, ascending."""

    assignment: Tensor
    queries: Tensor


def assign_hungarian(
    boxes: Tensor,
    objects: Tensor,
    *,
    logits: Tensor,
    labels: Tensor,
    image_size: tuple[int, int],
    class_cost: float = 2.0,
    l1_cost: float = 5.0,
    giou_cost: float = 2.0,
    alpha: float = 0.25,
    gamma: float = 2.0,
    valid: Tensor | None = None,
) -> Tensor:
    """Assign to each object (G, 4) one of the queries, given by ``boxes`` (Q, 4) and ``logits`` (Q, C).

    The assignment has the lowest total of :func:`matching_costs`. Queries without an object are negative; those that
    are not ``valid`` are ignored. If there are more objects than queries, some objects get no query.

    Computed in float32, also under autocast. Costs that are not finite raise a ValueError that names their source.
    Takes O(G^2 Q) time on the CPU in the worst case.

    Args:
        boxes: boxes (Q, 4) of the queries.
        objects: boxes (G, 4) of the objects.
        logits: class logits (Q, C) of the queries.
        labels: labels (G,) of the objects, from 0.
        image_size: height and width, by which the L1 distance is scaled.
        class_cost: weight of the class.
        l1_cost: weight of the L1 distance.
        giou_cost: weight of the GIoU.
        alpha: weight of the positive part of the focal cost of the class.
        gamma: exponent of the focal cost of the class.
        valid: which queries take part (Q,); by default all.

    >>> boxes = torch.tensor([[0.0, 0, 4, 4], [4, 4, 8, 8], [0, 0, 8, 8]])
    >>> objects, labels = torch.tensor([[5.0, 5, 8, 8]]), torch.tensor([0])
    >>> logits = torch.zeros(3, 1)
    >>> assign_hungarian(boxes, objects, logits=logits, labels=labels, image_size=(8, 8))
    tensor([-1,  0, -1])
    """
    image_queries = ImageQueries(boxes, objects, logits, labels, image_size, valid)
    (assigned,) = assign_hungarian_batch([image_queries], CostWeights(class_cost, l1_cost, giou_cost, alpha, gamma))
    return assigned.assignment


@torch.no_grad()
def assign_hungarian_batch(batch: Sequence[ImageQueries], weights: CostWeights) -> list[QueryAssignment]:
    """Return what :func:`assign_hungarian` assigns for each entry of ``batch``, such as all layers and images.

    The host waits for the device once, for the costs of the whole batch, and once more if an entry has ``valid``.

    Args:
        batch: boxes, logits, objects and labels of each entry.
        weights: weights of the parts of the cost.
    """
    import numpy as np  # imported here, like scipy: only DETRs need them
    from scipy.optimize import linear_sum_assignment

    for each in batch:
        _check(each)
    if not batch:
        return []
    device = batch[0].boxes.device
    rows = _valid_rows(batch)
    matchable = [each if own is None else _select(each, own) for each, own in zip(batch, rows, strict=True)]
    sizes = [(width, height) * 2 for height, width in (each.image_size for each in batch)]
    scales = torch.tensor(sizes, dtype=torch.float32).to(device, non_blocking=True)
    costs = [
        _scaled_costs(each.boxes, each.objects, each.logits, each.labels, scale, weights)
        for each, scale in zip(matchable, scales, strict=True)
    ]
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
    check_valid(NAME, valid, len(boxes))
    if logits.dim() != 2 or len(logits) != len(boxes):
        raise ValueError(f"{NAME}: expected logits of shape ({len(boxes)}, classes), got {tuple(logits.shape)}")
    if labels.shape != objects.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"{NAME}: expected labels as integers of shape ({len(objects)},), one for each object, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )


def _valid_rows(batch: Sequence[ImageQueries]) -> list[Tensor | None]:
    """Return the rows of the valid queries of each entry; None where all are valid."""
    masks = [each.valid for each in batch if each.valid is not None]
    if not masks:
        return [None] * len(batch)
    on_host = torch.cat(masks).cpu().split([len(mask) for mask in masks])
    numbers = [mask.numpy().nonzero()[0] for mask in on_host]
    rows = iter(_to_device(numbers, masks[0].device))
    return [None if each.valid is None else next(rows) for each in batch]


def _to_device(integers: Sequence[Any], device: torch.device) -> Sequence[Tensor]:
    """Copy numpy arrays of equal shape up to their last dimension to ``device``, in one transfer."""
    import numpy as np

    joined = torch.from_numpy(np.concatenate(integers, -1).astype(np.int64, copy=False))
    parts: Sequence[Tensor] = joined.to(device, non_blocking=True).split([each.shape[-1] for each in integers], -1)
    return parts


def _select(queries: ImageQueries, rows: Tensor) -> ImageQueries:
    return queries._replace(boxes=queries.boxes[rows], logits=queries.logits[rows])


def matching_costs(
    boxes: Tensor,
    objects: Tensor,
    *,
    logits: Tensor,
    labels: Tensor,
    image_size: tuple[int, int],
    weights: CostWeights,
) -> Tensor:
    """Return the cost (Q, G) of each query for each object: weighted focal cost plus L1 distance minus GIoU.

    The focal cost is the focal loss of the object's class as a positive minus its focal loss as a negative. L1 compares
    centre and size in units of ``image_size`` (height, width).
    """
    height, width = image_size
    scale = torch.tensor([width, height, width, height], dtype=torch.float32, device=boxes.device)
    return _scaled_costs(boxes, objects, logits, labels, scale, weights)


def _scaled_costs(
    boxes: Tensor, objects: Tensor, logits: Tensor, labels: Tensor, scale: Tensor, weights: CostWeights
) -> Tensor:
    """Return :func:`matching_costs`, where ``scale`` (4,) holds width, height, width and height of the image."""
    from torchvision.ops import box_convert, generalized_box_iou

    with torch.autocast(boxes.device.type, enabled=False):
        boxes, objects, chosen = boxes.float(), objects.float(), logits.float()[:, labels.long()]
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
