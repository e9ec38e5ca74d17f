"""Measure a run for the report: metrics, matched images, training candidates, and gradients per detection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bucketrank.boxes import paired_iou
from bucketrank.data import CocoDataset, Split, eval_transform
from bucketrank.detectors import Detector
from bucketrank.detectors.assignment import IGNORED
from bucketrank.detectors.criterion import Assigned, Criterion, HeadRecipe, build_criterion
from bucketrank.devices import resolve_device
from bucketrank.errors import DataError
from bucketrank.evaluation import CalibrationErrors, EvaluationResult
from bucketrank.evaluation.calibration import fold
from bucketrank.evaluation.metrics import Curve
from bucketrank.inference.evaluation import EvaluationSetup, prepare_evaluation
from bucketrank.report.built import Facts, built_facts
from bucketrank.report.confusion import Confusion, confusion
from bucketrank.report.matching import MIN_IOU, Detection, MatchedImage, best_and_worst, match_all
from bucketrank.report.run_folder import RunFolder
from bucketrank.settings import LossSettings, RankingSettings
from bucketrank.settings.choices import MIN_LABEL
from bucketrank.weights.files import Meta

CURVE_IOUS = (0.5, 0.75)  # IoU thresholds of the precision-recall curves
NUM_RANKED_LISTS = 3  # worst images with a ranked list, and as many best images
EPSILON = 1e-7  # scores of exactly 0 or 1 have infinite log-odds


@dataclass(frozen=True)
class Measurement:
    """The metrics of one run, and its best and worst images."""

    meta: Meta
    weights: Path
    data: Path
    split: Split
    total: int  # number of images in the split
    results: dict[str, EvaluationResult]  # "boxes" or "masks": metrics
    precision_recall: dict[str, dict[float, Curve]]  # "boxes" or "masks": IoU: curve
    errors: CalibrationErrors  # calibration errors of the boxes
    images: int  # number of measured images
    best: list[MatchedImage]
    worst: list[MatchedImage]
    candidates: dict[int, TrainingCandidates]  # image id: candidates, for some of the best and worst images
    confusion: Confusion  # classes taken for others at the stored threshold
    built: Facts  # what the detector really has, where the recipe says null

    @property
    def class_names(self) -> dict[int, str]:
        """Map category ids to class names."""
        return dict(zip(self.meta.category_ids, self.meta.classes, strict=True))


def measure_run(
    run: RunFolder,
    data: Path,
    *,
    images: int,
    max_images: int | None = None,
    device: str = "auto",
    advance: Callable[[int, int], object] = lambda done, total: None,
) -> Measurement:
    """Run the detector on the (first ``max_images``) validation images of ``data`` and measure its detections.

    ``images`` is the number of best images to keep, and of worst images. ``advance`` is called with the number of
    images done and their total. Raises DataError or WeightsError if data or weights cannot be used.
    """
    if run.weights is None:
        raise DataError(f"{run.path}: expected weights.safetensors or best.safetensors in the run folder, got neither")
    settings = run.recipe.data
    prepared = prepare_evaluation(
        run.weights,
        data,
        layout=settings.chosen_layout,
        holdout=settings.holdout if run.data is not None and data.resolve() == run.data.resolve() else None,
        device=str(resolve_device(device)),
    )
    dataset, evaluator = prepared.images, prepared.evaluator
    count = len(dataset) if max_images is None else min(max_images, len(dataset))
    with torch.inference_mode():
        for index in range(count):
            image, target = dataset[index]
            evaluator.add([int(target["image_id"])], prepared.model([image.to(prepared.device)]))
            advance(index + 1, count)
    iou_types: list[Any] = ["boxes", "masks"] if prepared.model.masks else ["boxes"]
    seen_only = max_images is not None
    matched = match_all(
        dataset.split.read(),
        evaluator.detections,
        images=dataset.image_ids[:count],
        lvis=evaluator.style == "lvis",
    )
    best, worst = best_and_worst(matched, threshold=prepared.meta.threshold, count=images)
    return Measurement(
        meta=prepared.meta,
        weights=run.weights,
        data=data,
        split=dataset.split,
        total=len(dataset),
        results={iou_type: evaluator.result(iou_type, seen_only=seen_only) for iou_type in iou_types},
        precision_recall={
            iou_type: {iou: evaluator.precision_recall(iou_type, iou=iou, seen_only=seen_only) for iou in CURVE_IOUS}
            for iou_type in iou_types
        },
        errors=evaluator.calibration_errors(seen_only=seen_only),
        images=count,
        best=best,
        worst=worst,
        candidates=_candidates(prepared, [each.image["id"] for each in images_with_lists(best, worst)]),
        confusion=confusion(matched, prepared.meta.category_ids, threshold=prepared.meta.threshold),
        built=built_facts(prepared.model),
    )


def images_with_lists(best: Sequence[MatchedImage], worst: Sequence[MatchedImage]) -> list[MatchedImage]:
    """Choose the images whose ranked lists are shown, the worst first.

    A list without a correct detection has nothing to compare. Such images are left out unless there are no others.
    """
    with_correct = [each for each in [*worst, *best] if any(one.outcome == "correct" for one in each.detections)]
    chosen = [each for each in with_correct if each in worst][:NUM_RANKED_LISTS]
    chosen += [each for each in with_correct if each in best]
    return chosen[: 2 * NUM_RANKED_LISTS] or [*worst, *best][:1]


def _candidates(prepared: EvaluationSetup, image_ids: Sequence[int]) -> dict[int, TrainingCandidates]:
    calibration = prepared.meta.calibration
    if calibration is not None and calibration.method == "platt":
        fold(prepared.model.score_head(), calibration.score_map.inverse)  # back to the logits that training ranked
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


@dataclass(frozen=True)
class TrainingCandidates:
    """The training candidates of one image: one entry per class and candidate, highest logit first.

    Ignored candidates are left out.
    """

    logits: Tensor  # (n,)
    gradients: Tensor  # (n,)
    positives: Tensor  # (n,) True if an object of this class was assigned
    ious: Tensor  # (n,) IoU of the predicted box with that object; 0 for negatives
    classes: Tensor  # (n,) class indices from 0
    loss: float


def candidates(model: Detector, image: Tensor, target: dict[str, Any]) -> TrainingCandidates | None:
    """Get the candidates of the head whose scores become the detections, with ``image`` as a batch of one.

    Returns None for a head with a softmax over the classes, which has no ranked list of logits, and for another
    library's model, whose loss shows no candidates. The model is left in evaluation mode.
    """
    detecting = model.detecting_criterion()
    if detecting is None or detecting[0].softmax:
        return None
    criterion, call = detecting
    calls: list[Assigned] = []

    def record_call(module: nn.Module, inputs: tuple[Assigned | list[Assigned]]) -> None:  # noqa: ARG001 (torch's)
        calls.extend([inputs[0]] if isinstance(inputs[0], Assigned) else inputs[0])

    handle = criterion.register_forward_pre_hook(record_call)
    try:
        with _as_in_training(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # heads with a score-based loss may sample their candidates
            model([image], [target])
    finally:
        handle.remove()
    return _ranked(criterion, calls[call])


def _ranked(criterion: Criterion, assigned: Assigned) -> TrainingCandidates:
    with torch.enable_grad():
        logits = assigned.logits.detach().clone().requires_grad_()
        terms = criterion(replace(assigned, logits=logits))
        loss = criterion.classification_loss(terms)
        (gradient,) = torch.autograd.grad(loss, logits, allow_unused=True)
    gradients = torch.zeros_like(logits) if gradient is None else gradient
    rows = torch.where(assigned.positives)[0]
    ious = torch.zeros_like(assigned.logits)
    ious[rows, assigned.labels[rows]] = paired_iou(assigned.boxes, assigned.objects).to(ious.dtype)
    positives = torch.zeros_like(assigned.logits, dtype=torch.bool)
    positives[rows, assigned.labels[rows]] = True
    classes = torch.arange(assigned.logits.shape[1], device=ious.device).expand_as(ious)
    kept = assigned.labels != IGNORED
    order = assigned.logits[kept].flatten().argsort(descending=True, stable=True)
    logits, gradients, positives, ious, classes = (
        values.detach()[kept].flatten()[order].cpu()
        for values in (assigned.logits, gradients, positives, ious, classes)
    )
    return TrainingCandidates(logits, gradients, positives, ious, classes, float(loss.detach()))


@contextmanager
def _as_in_training(model: Detector) -> Iterator[None]:
    """Put the model in training mode, except for batch norms, dropout and the transform.

    Batch norms would change their statistics, dropout the logits, and the transform the image size.
    """
    model.train()
    for module in [model.transform, *model.modules()]:
        if module is model.transform or isinstance(module, _BatchNorm | nn.Dropout):
            module.eval()
    try:
        yield
    finally:
        model.eval()


@dataclass(frozen=True)
class DetectionGradients:
    """The loss of one image, and its gradient with respect to the score of each detection."""

    logits: list[float]  # log-odds of the scores
    gradients: list[float]
    loss: float


def gradients(
    detections: Sequence[Detection], settings: LossSettings, *, scores: Sequence[float] | None = None
) -> DetectionGradients:
    """Compute the classification loss as if the detections were the only candidates of the image.

    The target of a correct detection is its IoU, that of a wrong one is 0; ignored detections do not count. Ranking
    losses define their gradients by the identity update; autograd derives those of other losses. ``scores`` are the
    scores before calibration, which training ranked; by default the detections' own.
    """
    ranked = [each.score for each in detections] if scores is None else list(scores)
    logits = torch.tensor(ranked, dtype=torch.float64).clamp(EPSILON, 1 - EPSILON).logit().requires_grad_()
    targets = torch.tensor([_target(each) for each in detections], dtype=torch.float64)
    if not detections:
        return DetectionGradients([], [], 0.0)
    # With samples=True, cross-entropy is a mean over all entries, as in heads that train on a sample.
    loss = build_criterion(settings, HeadRecipe(samples=True, min_iou=MIN_IOU)).list_loss(logits, targets)
    (gradient,) = torch.autograd.grad(loss, logits, allow_unused=True)
    per_detection = torch.zeros_like(targets) if gradient is None else gradient
    return DetectionGradients(logits.detach().tolist(), per_detection.tolist(), float(loss.detach()))


def delta_of(settings: LossSettings) -> float | None:
    """Return the loss's delta; None for a loss without one."""
    return settings.effective_delta if isinstance(settings, RankingSettings) else None


def _target(detection: Detection) -> float:
    if detection.outcome == "ignored":
        return -1.0
    return max(detection.iou, MIN_LABEL) if detection.outcome == "correct" else 0.0
