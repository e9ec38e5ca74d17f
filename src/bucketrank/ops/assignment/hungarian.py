"""One query for one object, at the least total cost (Carion et al., ECCV 2020; Zhu et al., ICLR 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from bucketrank.ops.assignment.checks import check_boxes, check_valid, without_objects

TINY = 1e-12  # keeps the logarithm of a probability finite


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
    """Give every object (G, 4) one of the queries with ``boxes`` (Q, 4) and ``logits`` (Q, C), at the least total cost.

    The costs are those of :func:`matching_costs`. All other queries are negative; those not ``valid`` are ignored. Of
    more objects than queries only as many get one as there are queries.

    In float32, also under autocast. Costs that are not finite are an error that says what they came from.
    O(G^2 Q) on the CPU at worst.

    >>> boxes, objects = torch.tensor([[0.0, 0, 4, 4], [4, 4, 8, 8], [0, 0, 8, 8]]), torch.tensor([[5.0, 5, 8, 8]])
    >>> assign_hungarian(boxes, objects, logits=torch.zeros(3, 1), labels=torch.tensor([0]), image_size=(8, 8))
    tensor([-1,  0, -1])
    """
    from scipy.optimize import linear_sum_assignment  # here, as below: only DETRs need it

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
        class_cost=class_cost,
        l1_cost=l1_cost,
        giou_cost=giou_cost,
        alpha=alpha,
        gamma=gamma,
    )
    finite = costs.isfinite()
    if not finite.all():
        raise ValueError(_not_finite(name, finite, boxes[rows], logits[rows], objects))
    queries, owners = linear_sum_assignment(costs.cpu().numpy())
    assignment[rows[torch.from_numpy(queries).to(rows.device)]] = torch.from_numpy(owners).to(assignment)
    return assignment


def matching_costs(
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
) -> Tensor:
    """(Q, G) what each query costs as the one of each object: ``class_cost * focal + l1_cost * L1 - giou_cost * GIoU``.

    ``focal`` is what focal loss would lose by calling the object's class a positive, less by calling it a negative; L1
    compares centre and size in units of the image of (height, width).
    """
    from torchvision.ops import box_convert, generalized_box_iou

    with torch.autocast(boxes.device.type, enabled=False):
        boxes, objects, chosen = boxes.float(), objects.float(), logits.float()[:, labels]
        scores = chosen.sigmoid()
        positive = -alpha * (1 - scores) ** gamma * (scores + TINY).log()
        negative = -(1 - alpha) * scores**gamma * (1 - scores + TINY).log()
        height, width = image_size
        scale = boxes.new_tensor([width, height, width, height])
        found, wanted = (box_convert(these / scale, "xyxy", "cxcywh") for these in (boxes, objects))
        distance: Tensor = torch.cdist(found, wanted, p=1)
        overlap: Tensor = generalized_box_iou(boxes, objects)
        return class_cost * (positive - negative) + l1_cost * distance - giou_cost * overlap


def _not_finite(name: str, finite: Tensor, boxes: Tensor, logits: Tensor, objects: Tensor) -> str:
    parts = {"logits": logits, "boxes": boxes, "objects": objects}
    guilty = [
        f"the {part} of {int((~values.isfinite().all(1)).sum())} of {len(values)}"
        for part, values in parts.items()
        if not values.isfinite().all()
    ]
    return (
        f"{name}: expected finite costs, got {int((~finite).sum())} of {finite.numel()} that are not"
        f"{', from ' + ' and '.join(guilty) if guilty else ''}; the network has diverged: "
        "lower the learning rate, clip gradients, or train in float32 or bfloat16 instead of float16"
    )
