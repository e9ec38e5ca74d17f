"""Detections that differ between two runtimes only because scores are equal to rounding.

Where two overlapping candidates have the same score, rounding decides which of them non-maximum suppression keeps. The
choice then decides which further candidates are suppressed and which are beyond the limit of detections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.models.detection.transform import resize_boxes
from torchvision.ops import box_iou, clip_boxes_to_image

from bucketrank.detectors import Detector
from bucketrank.detectors.dense_detector import DenseDetector

TIE = 1e-6  # scores that differ by no more than this are equal to rounding
IOU_ROUNDING = 1e-3

Array = NDArray[Any]


@dataclass(frozen=True)
class Candidates:
    """The boxes (R, 4) of a dense detector before any selection, in pixels of the input, and their scores (R, C)."""

    boxes: Tensor
    scores: Tensor
    nms: float  # IoU above which the lower of two boxes of a class is suppressed

    @classmethod
    def of(cls, model: Detector, image: Tensor) -> Candidates | None:
        """Return the candidates in an image (1, 3, H, W); None for other detectors, and with score voting."""
        if not isinstance(model, DenseDetector) or model.vote:
            return None
        batch, _ = model.transform([image[0]])
        features = model.neck(model.backbone(batch.tensors))
        output = model.head(features)
        boxes = model.coder.decode_single(output.box_deltas[0].float(), torch.cat(model.anchors(features)))
        size = batch.image_sizes[0]
        boxes = resize_boxes(clip_boxes_to_image(boxes, size), list(size), list(image.shape[-2:]))
        return cls(boxes, model.scores(output)[0], model.nms)

    def contain(self, box: Array, label: int, score: float, *, box_limit: float, score_limit: float) -> bool:
        """Return whether a detection is one of the candidates, within the limits; labels count from 1."""
        near = (self.boxes - torch.from_numpy(box)).abs().amax(1) <= box_limit
        return bool((near & ((self.scores[:, label - 1] - score).abs() <= score_limit)).any())

    def have_tie(self, box: Array, label: int, score: float) -> bool:
        """Return whether another candidate of the same class has the same score and overlaps, so that one is kept."""
        tied = (self.scores[:, label - 1] - score).abs() <= TIE
        competing = box_iou(torch.from_numpy(box)[None], self.boxes[tied])[0] > self.nms - IOU_ROUNDING
        return int(competing.sum()) > 1  # the detection itself is among them


def tied_detections(
    candidates: Candidates,
    one: dict[str, Array],
    other: dict[str, Array],
    unpaired: tuple[list[int], list[int]],
    *,
    limits: tuple[float, float],
) -> tuple[int, int]:
    """Return how many of the unpaired detections of ``one`` and of ``other`` follow from equal scores.

    A detection does if it is one of the candidates, within ``limits`` of box and score, and

    - a candidate that competes with it has the same score; or
    - it competes with an unpaired detection on the other side that follows from equal scores; or
    - its score is not above the lowest on the other side by more than rounding: the limit of detections cut it off.
    """
    sides = (one, other)
    open_rows: list[set[int]] = [set(), set()]
    explained: list[set[int]] = [set(), set()]
    for side, (detections, rows) in enumerate(zip(sides, unpaired, strict=True)):
        lowest = float(sides[1 - side]["scores"].min(initial=0.0 if not len(sides[1 - side]["scores"]) else 1.0))
        at_limit = len(detections["scores"]) == len(sides[1 - side]["scores"])
        for row in rows:
            box, label, score = (
                detections["boxes"][row],
                int(detections["labels"][row]),
                float(detections["scores"][row]),
            )
            if not candidates.contain(box, label, score, box_limit=limits[0], score_limit=limits[1]):
                continue
            if candidates.have_tie(box, label, score) or (at_limit and score <= lowest + TIE):
                explained[side].add(row)
            else:
                open_rows[side].add(row)
    changed = True
    while changed:
        changed = False
        for side in (0, 1):
            for row in sorted(open_rows[side]):
                if _competes(sides[side], row, sides[1 - side], explained[1 - side], candidates.nms):
                    open_rows[side].remove(row)
                    explained[side].add(row)
                    changed = True
    return len(explained[0]), len(explained[1])


def _competes(detections: dict[str, Array], row: int, others: dict[str, Array], rows: set[int], nms: float) -> bool:
    """Return whether a detection overlaps one of these rows of the others, of the same class, by more than ``nms``."""
    same = [each for each in sorted(rows) if others["labels"][each] == detections["labels"][row]]
    if not same:
        return False
    overlaps = box_iou(
        torch.from_numpy(detections["boxes"][row])[None], torch.from_numpy(others["boxes"][np.array(same)])
    )
    return bool((overlaps > nms - IOU_ROUNDING).any())
