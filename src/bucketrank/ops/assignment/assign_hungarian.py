"""One query per object, at the lowest total cost (Carion et al., ECCV 2020; Zhu et al., ICLR 2021)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bucketrank.ops.assignment.checks import check_boxes, check_valid, without_objects

TINY = 1e-12  # keeps the logarithm of a probability finite


class CostWeights(NamedTuple):
    """Weights of the three matching costs, and focal loss's ``alpha`` and ``gamma``."""

    classification: float
    l1: float
    giou: float
    alpha: float
    gamma: float


@torch.no_grad()
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

    >>> boxes, objects = torch.tensor([[0.0, 0, 4, 4], [4, 4, 8, 8], [0, 0, 8, 8]]), torch.tensor([[5.0, 5, 8, 8]])
    >>> assign_hungarian(boxes, objects, logits=torch.zeros(3, 1), labels=torch.tensor([0]), image_size=(8, 8))
    tensor([-1,  0, -1])
    """
    import numpy as np  # imported here, like scipy: only DETRs need them
    from scipy.optimize import linear_sum_assignment

    name = "assign_hungarian"
    check_boxes(name, boxes=boxes, objects=objects)
    check_valid(name, valid, len(boxes))
    if logits.dim() != 2 or len(logits) != len(boxes):
        raise ValueError(f"{name}: expected logits of shape ({len(boxes)}, classes), got {tuple(logits.shape)}")
    if labels.shape != objects.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"{name}: expected labels as integers of shape ({len(objects)},), one for each object, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    assignment = without_objects(boxes, valid)
    rows = torch.arange(len(boxes), device=boxes.device) if valid is None else torch.where(valid)[0]
    if not len(rows) or not len(objects):
        return assignment
    costs = matching_costs(
        boxes[rows],
        objects,
        logits=logits[rows],
        labels=labels,
        image_size=image_size,
        weights=CostWeights(class_cost, l1_cost, giou_cost, alpha, gamma),
    )
    matrix = costs.cpu().numpy()  # the only wait for the device
    if not np.isfinite(matrix).all():
        raise ValueError(_not_finite(name, costs.isfinite(), boxes[rows], logits[rows], objects))
    queries, owners = torch.from_numpy(np.stack(linear_sum_assignment(matrix))).to(assignment)
    assignment[rows[queries]] = owners
    return assignment


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
    from torchvision.ops import box_convert, generalized_box_iou

    with torch.autocast(boxes.device.type, enabled=False):
        boxes, objects, chosen = boxes.float(), objects.float(), logits.float()[:, labels]
        scores = chosen.sigmoid()
        positive = -weights.alpha * (1 - scores) ** weights.gamma * (scores + TINY).log()
        negative = -(1 - weights.alpha) * scores**weights.gamma * (1 - scores + TINY).log()
        height, width = image_size
        scale = boxes.new_tensor([width, height, width, height])
        scaled_boxes, scaled_objects = (box_convert(each / scale, "xyxy", "cxcywh") for each in (boxes, objects))
        distance: Tensor = torch.cdist(scaled_boxes, scaled_objects, p=1)
        overlap: Tensor = generalized_box_iou(boxes, objects)
        return weights.classification * (positive - negative) + weights.l1 * distance - weights.giou * overlap


def _not_finite(name: str, finite: Tensor, boxes: Tensor, logits: Tensor, objects: Tensor) -> str:
    inputs = {"logits": logits, "boxes": boxes, "objects": objects}
    sources = [
        f"the {argument} of {int((~values.isfinite().all(1)).sum())} of {len(values)}"
        for argument, values in inputs.items()
        if not values.isfinite().all()
    ]
    return (
        f"{name}: expected finite costs, got {int((~finite).sum())} of {finite.numel()} that are not"
        f"{', from ' + ' and '.join(sources) if sources else ''}; the network has diverged: "
        "lower the learning rate, clip gradients, or train in float32 or bfloat16 instead of float16"
    )
