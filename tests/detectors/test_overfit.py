"""Every detector overfits four images with its default loss."""

from typing import Any

import pytest
import torch
from faster_coco_eval import COCO, COCOeval_faster

from bucketrank.settings import detectors

from .small_detectors import CLASSES, small_detector

COLOURS = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.3, 0.9], [0.2, 0.8, 0.2]])
SIZE = (96, 128)


def coloured_rectangles(count=4, seed=0):
    """Return images of three rectangles side by side, whose colours are their classes, and targets."""
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    images, targets = [], []
    for _ in range(count):
        image = 0.4 + 0.2 * torch.rand(3, *SIZE, generator=generator)
        boxes, labels, masks = [], [], []
        for column in range(3):
            x, width, height = 42 * column + number(0, 4), number(18, 38), number(18, 38)
            y, label = number(0, SIZE[0] - height), number(1, CLASSES + 1)
            box = (x, y, x + width, y + height)
            image[:, y : box[3], x : box[2]] = COLOURS[label - 1][:, None, None]
            mask = torch.zeros(SIZE, dtype=torch.uint8)
            mask[y : box[3], x : box[2]] = 1
            boxes.append(box)
            labels.append(label)
            masks.append(mask)
        images.append(image)
        targets.append(
            {"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels), "masks": torch.stack(masks)}
        )
    return images, targets


def ap50(results, targets):
    """Return the AP50 of boxes, as faster-coco-eval computes it."""
    boxes = [
        (image, box, label)
        for image, t in enumerate(targets)
        for box, label in zip(t["boxes"].tolist(), t["labels"].tolist(), strict=True)
    ]
    ground_truth = COCO(
        {
            "images": [{"id": image, "height": SIZE[0], "width": SIZE[1]} for image in range(len(targets))],
            "categories": [{"id": label, "name": str(label)} for label in range(1, CLASSES + 1)],
            "annotations": [
                {
                    "id": n + 1,
                    "image_id": image,
                    "category_id": label,
                    "bbox": xywh(box),
                    "area": area(box),
                    "iscrowd": 0,
                }
                for n, (image, box, label) in enumerate(boxes)
            ],
        }
    )
    detections = [
        {"image_id": image, "category_id": label, "bbox": xywh(box), "score": score}
        for image, result in enumerate(results)
        for box, label, score in zip(
            result["boxes"].tolist(), result["labels"].tolist(), result["scores"].tolist(), strict=True
        )
    ]
    evaluation = COCOeval_faster(ground_truth, ground_truth.loadRes(detections), "bbox", print_function=lambda *_: None)
    evaluation.run()
    return evaluation.stats_as_dict["AP_50"]


def xywh(box):
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def area(box):
    return (box[2] - box[0]) * (box[3] - box[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", detectors())
def test_every_detector_overfits_four_images(name):
    images, targets = coloured_rectangles()
    settings: dict[str, Any] = {"hidden": 128, "proposals": 60} if name.endswith(("rcnn", "detr")) else {}
    if name == "co_dino":  # fewer tokens and copies, which take most of the time
        settings |= {"levels": 4, "denoising": 12, "proposals": 60}
    if name == "mask_rcnn":
        settings["mask_rois"] = 32  # masks take most of the time
    model = small_detector(name, channels=64, min_size=SIZE[0], max_size=SIZE[1], **settings)
    # The box heads of R-CNNs train on pooled objects and need fewer steps.
    steps, rate = 50 if name.endswith("rcnn") else 90, 3e-3
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    for _ in range(steps):
        optimiser.zero_grad()
        sum(model(images, targets).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        results = model.eval()(images)
    assert ap50(results, targets) >= 0.9
