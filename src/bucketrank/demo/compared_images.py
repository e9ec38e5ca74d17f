"""The detections of both runs in the same validation images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torchvision.ops import box_iou

from bucketrank.demo.paired_runs import DemoRun, ShapeData
from bucketrank.drawing import draw


@dataclass(frozen=True)
class ComparedImage:
    """One image with its ground truth, followed by the detections of each run."""

    image_id: int
    image: Tensor
    boxes: list[dict[str, Tensor]]  # the ground truth, then the detections of each run
    drawn: list[Image.Image]  # the image with each entry of ``boxes`` drawn
    counts: list[tuple[int, int]]  # correct and wrong detections of each run

    @property
    def objects(self) -> int:
        """Number of objects in the ground truth."""
        return len(self.boxes[0]["labels"])


def compare_images(runs: Sequence[DemoRun], data: ShapeData, count: int) -> list[ComparedImage]:
    """Compare the runs on ``count`` validation images at equal distances in the data set."""
    last = len(data.val) - 1
    indices = sorted({round(number * last / max(count - 1, 1)) for number in range(count)})
    compared = []
    for index in indices:
        image, target = data.val[index]
        boxes = [{"boxes": target["boxes"], "labels": target["labels"]}]
        drawn = [draw(image, boxes[0], classes=data.classes)]
        counts = []
        for run in runs:
            (detections,) = run.detect([image])
            kept = detections["scores"] >= run.threshold
            boxes.append({name: values[kept] for name, values in detections.items()})
            drawn.append(draw(image, boxes[-1], classes=data.classes, ground_truth=target))
            correct = count_correct(boxes[-1], target)
            counts.append((correct, int(kept.sum()) - correct))
        compared.append(ComparedImage(int(target["image_id"]), image, boxes, drawn, counts))
    return compared


def count_correct(detections: dict[str, Tensor], target: dict[str, Tensor], *, iou: float = 0.5) -> int:
    """Count the detections that match an object of their class; the best detection takes an object first.

    >>> boxes, labels = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10]]), torch.tensor([1, 1])
    >>> count_correct({"boxes": boxes, "labels": labels}, {"boxes": boxes[:1], "labels": labels[:1]})
    1
    """
    overlaps = box_iou(detections["boxes"], target["boxes"])
    overlaps = torch.where(detections["labels"][:, None] == target["labels"], overlaps, 0.0)
    correct = 0
    for row in overlaps:
        if len(row) and float(row.max()) >= iou:
            overlaps[:, row.argmax()] = 0.0
            correct += 1
    return correct
