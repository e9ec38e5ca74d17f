"""Detections of a model on images with ground truth, matched by COCO's rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bucketrank.calibration.samples import Detections, Item, Samples
from bucketrank.calibration.score_head import CannotCalibrateError, ScoreHead
from bucketrank.calibration.score_map import ScoreMap
from bucketrank.evaluation import CalibrationErrors, Evaluator, MatchedDetections
from bucketrank.evaluation.calibration_error import OVERLAP
from bucketrank.evaluation.evaluator import LVIS_DETECTIONS
from bucketrank.evaluation.threshold import Curve, best_threshold

SAME_SCORE = 1e-5  # a detection's score and the softmax it was computed from differ by rounding only
SIDE = 1  # of the images in a generated document; boxes are matched by IoU alone


@dataclass(frozen=True)
class Outcomes:
    """Matched detections; a column of the head is the class of a detection, counted from 0."""

    matched: MatchedDetections  # at an IoU of 0.5
    overlapping: MatchedDetections  # at any overlap
    first_label: int  # the label of column 0 in the matched detections
    logits: NDArray[np.float64] | None  # (n, columns) of all detections, for a softmax
    first_image: tuple[NDArray[np.float64], NDArray[np.int64]]  # scores and columns
    first_item: Item  # the same image and its target
    images: int

    def columns(self, matched: MatchedDetections) -> NDArray[np.int64]:
        """Return the column of each detection."""
        return matched.labels - self.first_label

    def mapped(self, score_map: ScoreMap) -> Outcomes:
        """Return the same detections with calibrated scores."""
        both = [
            replace(each, scores=score_map(each.scores, self.columns(each)))
            for each in (self.matched, self.overlapping)
        ]
        return replace(self, matched=both[0], overlapping=both[1])

    @property
    def errors(self) -> CalibrationErrors:
        """The calibration errors of the detections."""
        return CalibrationErrors.of(self.matched, self.overlapping)

    @property
    def best_threshold(self) -> float:
        """The score of the best F1; 0 if no detection is right."""
        matched = self.matched
        curve = Curve.of(scores=matched.scores, right=matched.right, objects=int(matched.objects.sum()))
        threshold = best_threshold(curve)
        return 0.0 if np.isnan(threshold) else threshold


@torch.no_grad()
def collect(head: ScoreHead, samples: Samples) -> Outcomes:
    """Detect in all images and match the detections."""
    evaluator = None if samples.split is None else Evaluator(samples.split, style="auto")
    most = LVIS_DETECTIONS if evaluator is not None and evaluator.style == "lvis" else None
    first_item: Item | None = None
    results: list[dict[str, Tensor]] = []
    targets: list[Mapping[str, Any]] = []
    rows: list[Tensor] = []
    for inputs, target in samples.items:
        first_item = first_item or (inputs, target)
        with _logits_kept(head) as outputs:
            detected = samples.detect(inputs)
        detections = {name: detected[name].detach().cpu() for name in ("boxes", "labels", "scores")}
        # In the order, and up to the number, of the evaluator's detections, to which the logits are matched.
        kept = detections["scores"].argsort(descending=True, stable=True)[:most] if most is not None else ...
        results.append({name: values[kept] for name, values in detections.items()})
        targets.append(target)
        if head.link == "softmax":
            rows.append(_rows_of(head, outputs, results[-1]))
    if first_item is None:
        raise CannotCalibrateError("calibrate: expected at least one image with ground truth, got none")
    first = results[0]
    first_image = first["scores"].double().numpy(), first["labels"].numpy() - head.first_label
    first_label = head.first_label
    if evaluator is None:
        evaluator = Evaluator(_document(head, targets))
        image_ids = list(range(len(targets)))
        results = [each | {"labels": each["labels"] - first_label + 1} for each in results]
        first_label = 1
    else:
        image_ids = [int(target["image_id"]) for target in targets]
    evaluator.add(image_ids, results)
    logits = None
    if rows:  # in the order of the evaluator's detections, that of the image ids
        logits = torch.cat([rows[index] for index in np.argsort(image_ids, kind="stable")]).double().numpy()
    return Outcomes(
        matched=evaluator.matched(seen_only=True),
        overlapping=evaluator.matched(iou=OVERLAP, seen_only=True),
        first_label=first_label,
        logits=logits,
        first_image=first_image,
        first_item=first_item,
        images=len(targets),
    )


def _document(head: ScoreHead, targets: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ground truth in COCO's format; category ids are columns counted from 1."""
    annotations: list[dict[str, Any]] = []
    for number, target in enumerate(targets):
        boxes, labels = torch.as_tensor(target["boxes"]).double(), torch.as_tensor(target["labels"])
        crowds = torch.as_tensor(target.get("iscrowd", torch.zeros(len(labels))))
        for (x1, y1, x2, y2), label, crowd in zip(boxes.tolist(), labels.tolist(), crowds.tolist(), strict=True):
            column = int(label) - head.first_label
            if not 0 <= column < head.columns:
                last = head.first_label + head.columns - 1
                raise ValueError(f"calibrate: expected labels from {head.first_label} to {last}, got {label}")
            entry = {"image_id": number, "category_id": column + 1, "iscrowd": int(crowd)}
            annotations.append(entry | {"id": len(annotations) + 1, "bbox": [x1, y1, x2 - x1, y2 - y1]})
    return {
        "images": [{"id": number, "width": SIDE, "height": SIDE} for number in range(len(targets))],
        "categories": [{"id": column + 1, "name": str(column)} for column in range(head.columns)],
        "annotations": annotations,
    }


@contextmanager
def _logits_kept(head: ScoreHead) -> Iterator[list[Tensor]]:
    """Yield a list that receives the logits of a softmax head while the block runs."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = [module.register_forward_hook(keep) for module in head.sources] if head.link == "softmax" else []
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _rows_of(head: ScoreHead, outputs: list[Tensor], detections: Detections) -> Tensor:
    """Return the logits (n, columns) behind each detection: the candidate whose softmax is its score."""
    logits = torch.stack([each.detach().float().cpu().reshape(-1, head.columns) for each in outputs]).mean(0)
    if not len(detections["scores"]):
        return logits[:0]
    of_class = logits.softmax(1).T[detections["labels"] - head.first_label]  # (n, candidates)
    distances, candidates = (of_class - detections["scores"].float()[:, None]).abs().min(1)
    if float(distances.max()) > SAME_SCORE:
        raise CannotCalibrateError(
            "calibrate: expected the scores of detections among the softmax of the logits, got others; the ScoreHead "
            "of this model does not describe it"
        )
    return logits[candidates]
