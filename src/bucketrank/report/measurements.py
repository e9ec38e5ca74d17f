"""Detections and metrics of a run's weights on the validation images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bucketrank.calibration import fold
from bucketrank.data import CocoDataset, DataError, Split, eval_transform
from bucketrank.deploy.weights_evaluation import EvaluationSetup, prepare_evaluation
from bucketrank.detectors import Detector
from bucketrank.devices import resolve_device
from bucketrank.evaluation import CalibrationErrors, EvaluationResult
from bucketrank.evaluation.threshold import Curve
from bucketrank.model_files.weights import Meta
from bucketrank.report.candidates import TrainingCandidates, candidates
from bucketrank.report.matching import MatchedImage, best_and_worst, match_all
from bucketrank.report.run_folder import RunFolder

IOUS = (0.5, 0.75)  # of the precision-recall curves
RANKED_LISTS = 3  # of the worst images, and as many of the best


@dataclass(frozen=True)
class Measurement:
    """The metrics of one run, and its best and worst images."""

    meta: Meta
    weights: Path
    data: Path
    split: Split
    total: int  # number of images in the split
    results: dict[str, EvaluationResult]  # by "boxes" and "masks"
    precision_recall: dict[str, dict[float, Curve]]  # by "boxes" and "masks", then by IoU
    errors: CalibrationErrors  # of the boxes
    images: int  # number of images measured
    best: list[MatchedImage]
    worst: list[MatchedImage]
    candidates: dict[int, TrainingCandidates]  # for some of the best and worst images, by image id

    @property
    def class_names(self) -> dict[int, str]:
        """Class names by category id."""
        return dict(zip(self.meta.category_ids, self.meta.classes, strict=True))


def measure_run(
    run: RunFolder,
    data: Path,
    *,
    images: int,
    most: int | None = None,
    device: str = "auto",
    advance: Callable[[int, int], object] = lambda done, total: None,
) -> Measurement:
    """Run the detector on the validation images of ``data``, or on the first ``most``, and measure its detections.

    ``images`` is the number of best images to keep, and of worst ones. ``advance`` is called with the numbers of images
    done and in total. Raises DataError or WeightsError if data or weights cannot be used.
    """
    if run.weights is None:
        raise DataError(f"{run.path}: expected weights.safetensors or best.safetensors in the run folder, got neither")
    layout = run.recipe.data.layout
    prepared = prepare_evaluation(
        run.weights, data, layout=None if layout == "auto" else layout, device=str(resolve_device(device))
    )
    dataset, evaluator = prepared.images, prepared.evaluator
    count = len(dataset) if most is None else min(most, len(dataset))
    with torch.inference_mode():
        for index in range(count):
            image, target = dataset[index]
            evaluator.add([int(target["image_id"])], _detect(prepared.model, image.to(prepared.device)))
            advance(index + 1, count)
    iou_types: list[Any] = ["boxes", "masks"] if prepared.model.masks else ["boxes"]
    seen_only = most is not None
    matched = match_all(
        dataset.split.read(),
        evaluator.detections,
        images=dataset.image_ids[:count],
        lvis=evaluator.style == "lvis",
    )
    best, worst = best_and_worst(matched, threshold=prepared.meta.threshold, most=images)
    return Measurement(
        meta=prepared.meta,
        weights=run.weights,
        data=data,
        split=dataset.split,
        total=len(dataset),
        results={iou_type: evaluator.result(iou_type, seen_only=seen_only) for iou_type in iou_types},
        precision_recall={
            iou_type: {iou: evaluator.precision_recall(iou_type, iou=iou, seen_only=seen_only) for iou in IOUS}
            for iou_type in iou_types
        },
        errors=evaluator.calibration_errors(seen_only=seen_only),
        images=count,
        best=best,
        worst=worst,
        candidates=_candidates(prepared, [each.image["id"] for each in images_with_lists(best, worst)]),
    )


def images_with_lists(best: Sequence[MatchedImage], worst: Sequence[MatchedImage]) -> list[MatchedImage]:
    """Return the images whose ranked lists are shown, the worst first.

    A list without a correct detection has nothing to compare. Such images are left out, unless there are no others.
    """
    with_correct = [each for each in [*worst, *best] if any(one.outcome == "correct" for one in each.detections)]
    chosen = [each for each in with_correct if each in worst][:RANKED_LISTS]
    chosen += [each for each in with_correct if each in best]
    return chosen[: 2 * RANKED_LISTS] or [*worst, *best][:1]


def _candidates(prepared: EvaluationSetup, image_ids: Sequence[int]) -> dict[int, TrainingCandidates]:
    calibration = prepared.meta.calibration
    if calibration is not None and calibration.method == "platt":
        fold(prepared.model.score_head(), calibration.score_map.inverse)  # the logits that training ranked
    dataset = CocoDataset(prepared.images.split, masks=prepared.model.masks, transform=eval_transform())
    by_image = {}
    for image_id in image_ids:
        image, target = dataset[dataset.image_ids.index(image_id)]
        on_device = {
            key: value.to(prepared.device) if isinstance(value, Tensor) else value for key, value in target.items()
        }
        ranked = candidates(prepared.model, image.to(prepared.device), on_device)
        if ranked is not None:
            by_image[image_id] = ranked
    return by_image


def _detect(model: Detector, image: Tensor) -> list[dict[str, Tensor]]:
    detections = model([image])
    if not isinstance(detections, list):
        raise TypeError("measure_run: expected a detector in evaluation mode, got losses")
    return detections
