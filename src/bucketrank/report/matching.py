"""Match detections to objects by the COCO rule, and choose the best and the worst images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bucketrank.boxes import paired_iou
from bucketrank.data.annotations import by_image

Outcome = Literal["correct", "wrong", "ignored"]

MIN_IOU = 0.5


@dataclass(frozen=True)
class GroundTruthObject:
    """An annotated object and the score of the detection that matched it."""

    category: int
    box: tuple[float, float, float, float]  # x1, y1, x2, y2
    crowd: bool
    segmentation: Any
    matched_score: float | None = None  # None if no detection matched it

    def is_detected(self, threshold: float) -> bool:
        """Return whether a detection with a score of at least ``threshold`` matched it."""
        return self.matched_score is not None and self.matched_score >= threshold


@dataclass(frozen=True)
class Detection:
    """A detection and whether it is correct."""

    category: int
    box: tuple[float, float, float, float]
    score: float
    outcome: Outcome
    iou: float  # IoU with its object; without one, the highest IoU with an object of its class
    segmentation: Any


@dataclass(frozen=True)
class MatchCounts:
    """Counts of correct and wrong detections and missed objects in one image at one threshold."""

    correct: int
    wrong: int
    missed: int

    @property
    def f1(self) -> float | None:
        """F1 score; None without objects and detections."""
        total = 2 * self.correct + self.wrong + self.missed
        return 2 * self.correct / total if total else None


@dataclass(frozen=True)
class MatchedImage:
    """One image with its detections, highest score first, and its objects."""

    image: dict[str, Any]  # entry in the annotation file
    detections: list[Detection]
    objects: list[GroundTruthObject]

    def counts(self, threshold: float) -> MatchCounts:
        """Count only detections with a score of at least ``threshold``."""
        outcomes = [each.outcome for each in self.detections if each.score >= threshold]
        correct = outcomes.count("correct")
        return MatchCounts(correct, outcomes.count("wrong"), sum(not each.crowd for each in self.objects) - correct)


def match_all(
    document: Mapping[str, Any], records: Sequence[dict[str, Any]], *, images: Sequence[int], lvis: bool = False
) -> list[MatchedImage]:
    """Match the detections ``records``, given as COCO results, in the images with the ids ``images``."""
    annotations, detections = by_image(document["annotations"]), by_image(records)
    entries = {image["id"]: image for image in document["images"]}
    return [match(entries[image_id], detections[image_id], annotations[image_id], lvis=lvis) for image_id in images]


def match(
    image: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    annotations: Sequence[Mapping[str, Any]],
    *,
    lvis: bool = False,
) -> MatchedImage:
    """Match one image by the COCO rule.

    In descending order of score, each detection takes the free object of its class with the highest IoU, if that IoU
    is at least 0.5. A detection without an object is wrong. It is ignored instead if at least half of it lies on a
    crowd of its class, and in LVIS also if the image was not annotated for its class, or not exhaustively.
    """
    objects = [
        GroundTruthObject(
            each["category_id"], _corners(each["bbox"]), bool(each.get("iscrowd", 0)), each.get("segmentation")
        )
        for each in annotations
    ]
    ordered = sorted(records, key=lambda record: -record["score"])
    boxes = [_corners(record["bbox"]) for record in ordered]
    ious = paired_iou(_tensor(boxes)[:, None], _tensor([each.box for each in objects]))
    annotated = {each["category_id"] for each in annotations} | set(image.get("neg_category_ids", ()))
    not_exhaustive = set(image.get("not_exhaustive_category_ids", ()))
    detections = []
    for number, (record, box) in enumerate(zip(ordered, boxes, strict=True)):
        category, score = int(record["category_id"]), float(record["score"])
        same = [index for index, each in enumerate(objects) if each.category == category and not each.crowd]
        best = max((float(ious[number, index]) for index in same), default=0.0)
        free = [index for index in same if objects[index].matched_score is None and ious[number, index] >= MIN_IOU]
        outcome: Outcome = "wrong"
        if free:
            taken = max(free, key=lambda index: float(ious[number, index]))
            objects[taken] = replace(objects[taken], matched_score=score)
            outcome, best = "correct", float(ious[number, taken])
        elif any(
            _share_on_crowd(box, each.box) >= MIN_IOU for each in objects if each.crowd and each.category == category
        ) or (lvis and (category not in annotated or category in not_exhaustive)):
            outcome = "ignored"
        detections.append(Detection(category, box, score, outcome, best, record.get("segmentation")))
    return MatchedImage(dict(image), detections, objects)


def best_and_worst(
    matched: Sequence[MatchedImage], *, threshold: float, count: int
) -> tuple[list[MatchedImage], list[MatchedImage]]:
    """Choose the images with the highest and the lowest F1 at ``threshold``, up to ``count`` each and none twice.

    Among images of equal F1, the best have more correct detections and the worst more mistakes. Images without objects
    and detections are left out.
    """
    rated = [(each, counts, counts.f1) for each in matched for counts in [each.counts(threshold)]]
    rising = sorted(
        ((each, counts, f1) for each, counts, f1 in rated if f1 is not None),
        key=lambda entry: (entry[2], entry[1].correct - entry[1].wrong - entry[1].missed),
    )
    half = (len(rising) + 1) // 2
    best = [each for each, _, _ in rising[::-1][: min(count, half)]]
    worst = [each for each, _, _ in rising[: min(count, len(rising) - len(best))]]
    return best, worst


def _corners(box: Sequence[float]) -> tuple[float, float, float, float]:
    x, y, width, height = map(float, box)
    return x, y, x + width, y + height


def _tensor(boxes: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4)


def _share_on_crowd(box: Sequence[float], crowd: Sequence[float]) -> float:
    """Compute the fraction of the box area that lies on a crowd box."""
    width = min(box[2], crowd[2]) - max(box[0], crowd[0])
    height = min(box[3], crowd[3]) - max(box[1], crowd[1])
    area = (box[2] - box[0]) * (box[3] - box[1])
    return max(width, 0.0) * max(height, 0.0) / area if area > 0 else 0.0
