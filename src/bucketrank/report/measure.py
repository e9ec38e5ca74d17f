"""What the weights of a run find in its validation images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bucketrank.data import CocoDataset, DataError, Split, eval_transform
from bucketrank.detectors import Detector
from bucketrank.evaluation import EvaluationResult
from bucketrank.evaluation.threshold import Curve
from bucketrank.report.candidates import Candidates, candidates
from bucketrank.report.folder import RunFolder
from bucketrank.report.matching import Matched, best_and_worst, match_all
from bucketrank.training.evaluate import Prepared, prepare
from bucketrank.training.weights import Meta

IOUS = (0.5, 0.75)  # of precision and recall
LISTED = 3  # ranked lists of the worst images, and of the best


@dataclass(frozen=True)
class Measured:
    """The numbers and the detections of one run."""

    meta: Meta
    weights: Path
    data: Path
    split: Split
    total: int  # images of the split
    results: dict[str, EvaluationResult]  # of boxes and masks
    precision_recall: dict[str, dict[float, Curve]]
    images: int  # that were measured
    best: list[Matched]
    worst: list[Matched]
    candidates: dict[int, Candidates]  # of some of the best and worst, by the image's id

    @property
    def names(self) -> dict[int, str]:
        """Of the categories."""
        return dict(zip(self.meta.category_ids, self.meta.classes, strict=True))


def measure(
    run: RunFolder,
    data: Path,
    *,
    images: int,
    most: int | None = None,
    device: str = "auto",
    advance: Callable[[int, int], object] = lambda done, total: None,
) -> Measured:
    """Detect on the validation images of ``data``, or on the first ``most``; ``advance`` is told how far it is.

    ``images`` is how many of the best and of the worst are wanted. DataError or WeightsError if that cannot be.
    """
    if run.weights is None:
        raise DataError(f"{run.path}: there are no weights to measure")
    layout = run.recipe.data.layout
    ready = prepare(run.weights, data, layout=None if layout == "auto" else layout, device=device)
    pictures, evaluator = ready.images, ready.evaluator
    wanted = list(range(len(pictures) if most is None else min(most, len(pictures))))
    with torch.inference_mode():
        for done, index in enumerate(wanted, start=1):
            picture, target = pictures[index]
            evaluator.add([int(target["image_id"])], _detected(ready.model, picture.to(ready.device)))
            advance(done, len(wanted))
    kinds: list[Any] = ["boxes", "masks"] if ready.model.masks else ["boxes"]
    seen_only = most is not None
    matched = match_all(
        pictures.split.read(),
        evaluator.detections,
        images=[pictures.image_ids[index] for index in wanted],
        lvis=evaluator.style == "lvis",
    )
    best, worst = best_and_worst(matched, threshold=ready.meta.threshold, most=images)
    return Measured(
        meta=ready.meta,
        weights=run.weights,
        data=data,
        split=pictures.split,
        total=len(pictures),
        results={kind: evaluator.result(kind, seen_only=seen_only) for kind in kinds},
        precision_recall={
            kind: {iou: evaluator.precision_recall(kind, iou=iou, seen_only=seen_only) for iou in IOUS}
            for kind in kinds
        },
        images=len(wanted),
        best=best,
        worst=worst,
        candidates=_candidates(ready, [each.image["id"] for each in listed(best, worst)]),
    )


def listed(best: Sequence[Matched], worst: Sequence[Matched]) -> list[Matched]:
    """The images whose ranked list is shown: the worst first, but those in which something was found."""
    telling = [each for each in [*worst, *best] if any(found.outcome == "right" for found in each.detections)]
    chosen = [each for each in telling if each in worst][:LISTED] + [each for each in telling if each in best]
    return chosen[: 2 * LISTED] or [*worst, *best][:1]


def _candidates(ready: Prepared, wanted: Sequence[int]) -> dict[int, Candidates]:
    images = CocoDataset(ready.images.split, masks=ready.model.masks, transform=eval_transform())
    found = {}
    for number in wanted:
        picture, target = images[images.image_ids.index(number)]
        on_device = {
            key: value.to(ready.device) if isinstance(value, Tensor) else value for key, value in target.items()
        }
        ranked = candidates(ready.model, picture.to(ready.device), on_device)
        if ranked is not None:
            found[number] = ranked
    return found


def _detected(model: Detector, picture: Tensor) -> list[dict[str, Tensor]]:
    found = model([picture])
    if not isinstance(found, list):
        raise TypeError("measure: expected a detector in evaluation mode, got losses")
    return found
