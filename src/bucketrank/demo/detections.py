"""What both have found in the same pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torchvision.ops import box_iou

from bucketrank.demo.contest import Contender, Material
from bucketrank.drawing import draw


@dataclass(frozen=True)
class Seen:
    """One picture: the truth, then what each contender found; of the contenders also (right, wrong) detections."""

    image_id: int
    image: Tensor
    shown: list[dict[str, Tensor]]
    pictures: list[Image.Image]  # the same drawn
    counts: list[tuple[int, int]]

    @property
    def objects(self) -> int:
        """How many there are to find."""
        return len(self.shown[0]["labels"])


def look(contenders: Sequence[Contender], material: Material, count: int) -> list[Seen]:
    """Pictures spread over those to evaluate on."""
    last = len(material.val) - 1
    chosen = sorted({round(place * last / max(count - 1, 1)) for place in range(count)})
    seen = []
    for index in chosen:
        image, target = material.val[index]
        shown = [{"boxes": target["boxes"], "labels": target["labels"]}]
        pictures = [draw(image, shown[0], classes=material.classes)]
        counts = []
        for contender in contenders:
            (found,) = contender.detect([image])
            kept = found["scores"] >= contender.threshold
            shown.append({name: values[kept] for name, values in found.items()})
            pictures.append(draw(image, shown[-1], classes=material.classes, ground_truth=target))
            right = matched(shown[-1], target)
            counts.append((right, int(kept.sum()) - right))
        seen.append(Seen(int(target["image_id"]), image, shown, pictures, counts))
    return seen


def matched(found: dict[str, Tensor], target: dict[str, Tensor], *, iou: float = 0.5) -> int:
    """How many detections, best first, have an object of their class to themselves.

    >>> boxes, labels = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10]]), torch.tensor([1, 1])
    >>> matched({"boxes": boxes, "labels": labels}, {"boxes": boxes[:1], "labels": labels[:1]})
    1
    """
    overlaps = box_iou(found["boxes"], target["boxes"])
    overlaps = torch.where(found["labels"][:, None] == target["labels"], overlaps, 0.0)
    right = 0
    for row in overlaps:
        if len(row) and float(row.max()) >= iou:
            overlaps[:, row.argmax()] = 0.0
            right += 1
    return right
