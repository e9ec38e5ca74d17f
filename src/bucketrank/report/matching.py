"""The detections of one image and its objects: which found which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bucketrank.ops.boxes import paired_iou

LEAST_IOU = 0.5
Outcome = Literal["right", "wrong", "excused"]


@dataclass(frozen=True)
class Object:
    """What is true; ``found_at`` is the score of the detection that found it."""

    category: int
    box: tuple[float, float, float, float]  # corners
    crowd: bool
    segmentation: Any
    found_at: float | None = None


@dataclass(frozen=True)
class Detection:
    """What was detected. ``iou`` is that with its object; if it has none, the highest with any of its class."""

    category: int
    box: tuple[float, float, float, float]
    score: float
    outcome: Outcome
    iou: float
    segmentation: Any


@dataclass(frozen=True)
class Counts:
    """Of one image at one score."""

    right: int
    wrong: int
    missed: int

    @property
    def f1(self) -> float | None:
        """None where there is nothing to find and nothing was."""
        total = 2 * self.right + self.wrong + self.missed
        return 2 * self.right / total if total else None


@dataclass(frozen=True)
class Matched:
    """One image: the detections in falling order of their scores, and the objects."""

    image: dict[str, Any]  # its entry in the annotations
    detections: list[Detection]
    objects: list[Object]

    def counts(self, threshold: float) -> Counts:
        """With the detections from ``threshold`` on."""
        shown = [each.outcome for each in self.detections if each.score >= threshold]
        right = shown.count("right")
        return Counts(right, shown.count("wrong"), sum(not each.crowd for each in self.objects) - right)


def match_all(
    document: Mapping[str, Any], records: Sequence[Mapping[str, Any]], *, images: Sequence[int], lvis: bool = False
) -> list[Matched]:
    """The images of these ids, with ``records`` in COCO's result format."""
    truths: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in document["annotations"]:
        truths[entry["image_id"]].append(entry)
    found: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        found[record["image_id"]].append(record)
    entries = {image["id"]: image for image in document["images"]}
    return [match(entries[number], found[number], truths[number], lvis=lvis) for number in images]


def match(
    image: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    truths: Sequence[Mapping[str, Any]],
    *,
    lvis: bool = False,
) -> Matched:
    """By COCO's rule: in the order of scores each detection takes the free object of its class that it overlaps most.

    It must overlap it by an IoU of 0.5. A detection that takes none is wrong, unless half of it lies on a crowd of its
    class; in LVIS also where nobody looked for its class, or not for all of its objects.
    """
    objects = [
        Object(entry["category_id"], _corners(entry["bbox"]), bool(entry.get("iscrowd", 0)), entry.get("segmentation"))
        for entry in truths
    ]
    ordered = sorted(records, key=lambda record: -record["score"])
    boxes = [_corners(record["bbox"]) for record in ordered]
    ious = paired_iou(_tensor(boxes)[:, None], _tensor([each.box for each in objects]))
    looked_for = {entry["category_id"] for entry in truths} | set(image.get("neg_category_ids", ()))
    not_all = set(image.get("not_exhaustive_category_ids", ()))
    detections = []
    for number, (record, box) in enumerate(zip(ordered, boxes, strict=True)):
        category, score = int(record["category_id"]), float(record["score"])
        same = [each for each, truth in enumerate(objects) if truth.category == category and not truth.crowd]
        best = max((float(ious[number, each]) for each in same), default=0.0)
        free = [each for each in same if objects[each].found_at is None and ious[number, each] >= LEAST_IOU]
        outcome: Outcome = "wrong"
        if free:
            taken = max(free, key=lambda each: float(ious[number, each]))
            objects[taken] = replace(objects[taken], found_at=score)
            outcome, best = "right", float(ious[number, taken])
        elif any(
            _on(box, truth.box) >= LEAST_IOU for truth in objects if truth.crowd and truth.category == category
        ) or (lvis and (category not in looked_for or category in not_all)):
            outcome = "excused"
        detections.append(Detection(category, box, score, outcome, best, record.get("segmentation")))
    return Matched(dict(image), detections, objects)


def best_and_worst(matched: Sequence[Matched], *, threshold: float, most: int) -> tuple[list[Matched], list[Matched]]:
    """The images of highest and of lowest F1 at ``threshold``, up to ``most`` of each and none in both.

    Of equal ones, those with more right come first among the best, those with more mistakes among the worst. An image
    without objects and without detections is neither.
    """
    rated = [(each, counts, counts.f1) for each in matched for counts in [each.counts(threshold)]]
    rising = sorted(
        ((each, counts, f1) for each, counts, f1 in rated if f1 is not None),
        key=lambda entry: (entry[2], entry[1].right - entry[1].wrong - entry[1].missed),
    )
    half = (len(rising) + 1) // 2
    best = [each for each, _, _ in rising[::-1][: min(most, half)]]
    worst = [each for each, _, _ in rising[: min(most, len(rising) - len(best))]]
    return best, worst


def _corners(box: Sequence[float]) -> tuple[float, float, float, float]:
    x, y, width, height = map(float, box)
    return x, y, x + width, y + height


def _tensor(boxes: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4)


def _on(box: Sequence[float], crowd: Sequence[float]) -> float:
    """The share of a box that lies on a crowd's."""
    width = min(box[2], crowd[2]) - max(box[0], crowd[0])
    height = min(box[3], crowd[3]) - max(box[1], crowd[1])
    area = (box[2] - box[0]) * (box[3] - box[1])
    return max(width, 0.0) * max(height, 0.0) / area if area > 0 else 0.0
