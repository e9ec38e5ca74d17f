"""Measure a run for the report: metrics, matched images, training candidates, and gradients per detection."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

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
from bucketrank.report.run_folder import RunFolder
from bucketrank.settings import LossSettings, RankingSettings, loss_spec
from bucketrank.settings.choices import MIN_LABEL
from bucketrank.weights.files import Meta

Outcome = Literal["correct", "wrong", "ignored"]

MIN_IOU = 0.5
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
    layout = run.recipe.data.layout
    prepared = prepare_evaluation(
        run.weights, data, layout=None if layout == "auto" else layout, device=str(resolve_device(device))
    )
    dataset, evaluator = prepared.images, prepared.evaluator
    count = len(dataset) if max_images is None else min(max_images, len(dataset))
    with torch.inference_mode():
        for index in range(count):
            image, target = dataset[index]
            evaluator.add([int(target["image_id"])], _detect(prepared.model, image.to(prepared.device)))
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


def _detect(model: Detector, image: Tensor) -> list[dict[str, Tensor]]:
    detections = model([image])
    if not isinstance(detections, list):
        raise TypeError("measure_run: expected a detector in evaluation mode, got losses")
    return detections


@dataclass(frozen=True)
class GroundTruthObject:
    """An annotated object and the score of the detection that matched it."""

    category: int
    box: tuple[float, float, float, float]  # x1, y1, x2, y2
    crowd: bool
    segmentation: Any
    matched_score: float | None = None  # None if no detection matched it


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
    document: Mapping[str, Any], records: Sequence[Mapping[str, Any]], *, images: Sequence[int], lvis: bool = False
) -> list[MatchedImage]:
    """Match the detections ``records``, given as COCO results, in the images with the ids ``images``."""
    annotations: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for annotation in document["annotations"]:
        annotations[annotation["image_id"]].append(annotation)
    by_image: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        by_image[record["image_id"]].append(record)
    entries = {image["id"]: image for image in document["images"]}
    return [match(entries[image_id], by_image[image_id], annotations[image_id], lvis=lvis) for image_id in images]


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


def describe_loss(settings: LossSettings) -> str:
    """Name the loss with its method and delta."""
    title = loss_spec(settings.name).heading
    if not isinstance(settings, RankingSettings):
        return title
    return f"{title}, {settings.method}, delta {settings.effective_delta:g}"


def _target(detection: Detection) -> float:
    if detection.outcome == "ignored":
        return -1.0
    return max(detection.iou, MIN_LABEL) if detection.outcome == "correct" else 0.0
