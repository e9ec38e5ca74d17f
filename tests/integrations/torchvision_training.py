"""Training and evaluation of torchvision detectors in a few lines."""

from collections.abc import Callable

import torch
from faster_coco_eval import COCO, COCOeval_faster
from torch import Tensor, nn

from tests.integrations.coloured_squares import Target
from tests.integrations.torchvision_models import CLASSES, SIZE


def train(model: nn.Module, steps: int, data: Callable[[int], tuple[list[Tensor], list[Target]]]) -> list[float]:
    """Train on ``data(step)`` and return the sum of the losses of each step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    totals = []
    for step in range(steps):
        loss = sum(model(*data(step)).values())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
        totals.append(loss.item())
    return totals


def average_precision(model: nn.Module, images: list[Tensor], targets: list[Target]) -> dict[str, float]:
    """Return COCO's ``AP`` and ``AP50``."""
    model.eval()
    with torch.no_grad():
        outputs = model([image.clone() for image in images])
    ground_truth = {
        "info": {},
        "images": [{"id": i, "height": SIZE, "width": SIZE} for i in range(len(images))],
        "categories": [{"id": label, "name": str(label)} for label in range(1, CLASSES)],
        "annotations": [
            {"id": 1000 * i + k + 1, "image_id": i, "category_id": int(label), "bbox": corner_and_size(box),
             "area": float((box[2:] - box[:2]).prod()), "iscrowd": 0}
            for i, target in enumerate(targets)
            for k, (box, label) in enumerate(zip(target["boxes"], target["labels"], strict=True))
        ],
    }  # fmt: skip
    detections = [
        {"image_id": i, "category_id": int(label), "bbox": corner_and_size(box), "score": float(score)}
        for i, output in enumerate(outputs)
        for box, label, score in zip(output["boxes"], output["labels"], output["scores"], strict=True)
    ]
    if not detections:
        return {"AP": 0.0, "AP50": 0.0}
    coco = COCO(ground_truth)
    evaluation = COCOeval_faster(coco, coco.loadRes(detections), "bbox", print_function=lambda *_: None)
    evaluation.run()
    return {"AP": float(evaluation.stats[0]), "AP50": float(evaluation.stats[1])}


def corner_and_size(box: Tensor) -> list[float]:
    x0, y0, x1, y1 = box.tolist()
    return [x0, y0, x1 - x0, y1 - y0]
