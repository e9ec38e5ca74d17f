"""Calibrate a detector: detect in images with ground truth, match, fit a score map, fold it, and verify the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bucketrank.data import CocoDataset, Split, eval_transform, find_splits, require_sound
from bucketrank.errors import CannotCalibrateError, require_choice
from bucketrank.evaluation import CalibrationErrors, Evaluator, MatchedDetections
from bucketrank.evaluation.calibration.mapping import (
    MIN_COUNT,
    Calibration,
    ScoreHead,
    ScoreMap,
    fit_platt,
    fit_softmax,
    fold,
    fold_softmax,
    logit,
    require_both,
    restored_on_error,
    unfoldable,
)
from bucketrank.evaluation.evaluator import LVIS_MAX_DETECTIONS
from bucketrank.evaluation.metrics import OVERLAP, best_threshold
from bucketrank.settings.choices import CalibrationMethod, CalibrationTarget

Detections = Mapping[str, Tensor]
Item = tuple[Any, Mapping[str, Any]]  # an image and its ground truth
Data = Path | str | Split | CocoDataset | Iterable[Any]

MAX_IMAGES = 500
SAME_SCORE = 1e-5  # rounding difference between a detection's score and the softmax it was computed from
SIDE = 1  # image side in a generated document; matching depends only on the IoU
ROUNDING = 2e-3  # accepted difference between the folded model's scores and the map, in float32
COARSE_ROUNDING = 0.05  # the same in float16 and bfloat16


@dataclass(frozen=True)
class Samples:
    """Single images with ground truth, and a function that returns the detections in one image.

    A ground truth has ``boxes`` (n, 4) as corners, ``labels`` (n,) and, optionally, ``iscrowd``. With a ``split`` the
    ground truth, including crowds, is read from its file, and a target only names its ``image_id``.
    """

    items: Iterable[Item]
    detect: Callable[[Any], Detections]
    split: Split | None = None

    @classmethod
    def of(cls, data: Data, detect: Callable[[Any], Detections], *, max_images: int | None) -> Samples:
        """Use ``data``: a folder (its training split), a split, or images or batches with their targets.

        A folder or split gives ``max_images`` evenly spread images; other data give the first ones.
        """
        if isinstance(data, Path | str):
            data = next(split for split in find_splits(data) if split is not None)
        if isinstance(data, Split):
            require_sound(data, masks=False)
            data = CocoDataset(data, transform=eval_transform())
        if isinstance(data, CocoDataset):
            images, total = data, len(data)
            count = total if max_images is None else min(max_images, total)
            spread = Repeatable(lambda: (images[number * total // count] for number in range(count)))
            return cls(spread, detect, data.split)
        return cls.first(data, detect, max_images=max_images)

    @classmethod
    def first(
        cls,
        data: Iterable[Any],
        detect: Callable[[Any], Detections],
        *,
        max_images: int | None,
        unbatch: Callable[[Any], Iterable[Item]] | None = None,
    ) -> Samples:
        """Use the first ``max_images`` images; ``unbatch`` turns an item of ``data`` into (image, target) pairs."""
        images = Repeatable(lambda: islice(chain.from_iterable(map(unbatch or unbatch_pairs, data)), max_images))
        return cls(list(images) if isinstance(data, Iterator) else images, detect)


@dataclass(frozen=True)
class Repeatable:
    """Images that every iteration reads again: a fit may need them twice."""

    images: Callable[[], Iterator[Item]]

    def __iter__(self) -> Iterator[Item]:
        return self.images()


def unbatch_pairs(pair: tuple[Any, Any]) -> Iterable[Item]:
    """Split a pair (images, targets) into pairs; a pair (image, target) is left as it is."""
    images, targets = pair
    return zip(images, targets, strict=True) if isinstance(targets, list | tuple) else [(images, targets)]


@dataclass(frozen=True)
class Outcomes:
    """Matched detections; a detection's class is a column of the head, counted from 0."""

    matched: MatchedDetections  # matched at an IoU of 0.5
    overlapping: MatchedDetections  # matched at any overlap
    first_label: int  # label of column 0 in the matched detections
    logits: NDArray[np.float64] | None  # (n, columns) logits of all detections, for a softmax
    first_image: tuple[NDArray[np.float64], NDArray[np.int64]]  # scores and columns
    first_item: Item  # the same image and its target
    images: int

    def columns(self, matched: MatchedDetections) -> NDArray[np.int64]:
        """Convert the labels of detections to columns."""
        return matched.labels - self.first_label

    def mapped(self, score_map: ScoreMap) -> Outcomes:
        """Calibrate the scores of all detections."""
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
        """The best-F1 score; 0 if no detection is right."""
        threshold = best_threshold(self.matched.curve)
        return 0.0 if np.isnan(threshold) else threshold


@torch.no_grad()
def collect(head: ScoreHead, samples: Samples) -> Outcomes:
    """Detect in all images and match the detections."""
    evaluator = None if samples.split is None else Evaluator(samples.split, style="auto")
    max_detections = LVIS_MAX_DETECTIONS if evaluator is not None and evaluator.style == "lvis" else None
    first_item: Item | None = None
    results: list[dict[str, Tensor]] = []
    targets: list[Mapping[str, Any]] = []
    rows: list[Tensor] = []
    for inputs, target in samples.items:
        first_item = first_item or (inputs, target)
        with _logits_kept(head) as outputs:
            detected = samples.detect(inputs)
        detections = {name: detected[name].detach().cpu() for name in ("boxes", "labels", "scores")}
        if max_detections is not None:  # the logits need the same detections in the same order as in the evaluator
            kept = detections["scores"].argsort(descending=True, stable=True)[:max_detections]
            detections = {name: values[kept] for name, values in detections.items()}
        results.append(detections)
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
    if rows:  # the evaluator sorts its detections by image id
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
    """Convert the ground truth to COCO format; category ids are columns counted from 1."""
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
    """Find the logits (n, columns) behind each detection: the candidate whose softmax is its score."""
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


@dataclass(frozen=True)
class FitSettings:
    """The target of the fit, whether each class gets its own pair, and the method, which depends on the head."""

    target: CalibrationTarget = "match"
    per_class: bool = False
    method: CalibrationMethod = "platt"

    def __post_init__(self) -> None:
        require_choice("calibrate: target", self.target, get_args(CalibrationTarget))
        require_choice("calibrate: method", self.method, get_args(CalibrationMethod))
        if self.per_class and self.method == "temperature":
            raise ValueError("calibrate: per_class: expected False with method temperature, which classes share")


def calibrate(
    model: nn.Module,
    data: Data,
    *,
    target: CalibrationTarget = "match",
    per_class: bool = False,
    method: CalibrationMethod = "platt",
    max_images: int | None = MAX_IMAGES,
) -> Calibration:
    """Turn the scores of a detector into probabilities, in place, and return the fitted map with its errors.

    ``model`` is a bucketrank detector; for torchvision and transformers models use ``calibrate`` in
    ``bucketrank.integrations``. ``data`` is a data folder (its training split is used), a split, or an iterable of
    pairs (image, target) as detectors take them, single or in batches.

    The detections in up to ``max_images`` images (None: all) are matched to the ground truth by the COCO rule at an IoU
    of 0.5. By default, ``method`` is ``"platt"``: ``p = sigmoid(a * logit + b)`` with a > 0 is fitted and folded into
    the last classification layer: ``weight * a`` and ``bias * a + b``. The detections in an image keep their order, so
    NMS and AP stay the same. ``target`` is ``"match"``, the probability of a match, or ``"iou"``, the expected IoU.
    ``per_class`` fits a pair for each class with enough detections: the order within a class stays, but top-k limits
    across classes may keep other detections. Minimum scores stored in the model are mapped with the scores.

    A softmax over the classes needs ``method="temperature"``: the logits are divided by a temperature and the
    background logit is shifted. The order of detections may change slightly.

    Raises CannotCalibrateError, and leaves the model unchanged, for scores that are products with a predicted quality,
    for too few right or wrong detections, and if higher scores are not right more often.
    """
    settings = FitSettings(target, per_class, method)
    score_head: Any = getattr(model, "score_head", None)
    if score_head is None:
        remedy = "for torchvision or transformers models use calibrate in bucketrank.integrations"
        if hasattr(getattr(model, "model", None), "score_head"):
            remedy = "pass its .model"
        raise TypeError(f"calibrate: expected a bucketrank detector, got {type(model).__name__}; {remedy}")
    device = next(model.parameters()).device

    def detect(image: Tensor) -> Mapping[str, Tensor]:
        (detections,) = model([image.to(device)])
        return detections  # type: ignore[no-any-return]

    samples = Samples.of(data, detect, max_images=max_images)
    calibration = calibrate_head(model, score_head(), samples, settings)
    model.stored_threshold = calibration.threshold(float(getattr(model, "stored_threshold", 0.0)))  # type: ignore[assignment]
    return calibration


@torch.inference_mode(mode=False)  # the fit needs gradients
def calibrate_head(model: nn.Module, head: ScoreHead, samples: Samples, settings: FitSettings) -> Calibration:
    """Fit a calibration and fold it into ``head``; the model's modules keep their modes."""
    _require_method(head, settings.method)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    rng_state = torch.random.get_rng_state()
    try:
        # Autocast would round the scores and keep copies of the weights from before folding.
        with restored_on_error(head), torch.autocast(next(model.parameters()).device.type, enabled=False):
            before = collect(head, samples)
            score_map = fitted(head, before, settings)
            if settings.method == "platt":
                fold(head, score_map)
                after = before.mapped(score_map)
                _require_folded(head, samples, score_map, before)
            else:
                fold_softmax(head, score_map.a[0], score_map.b[0])
                torch.random.set_rng_state(rng_state)  # a shuffling loader then gives the same images again
                after = collect(head, samples)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return summary(settings, score_map, before, after)


def summary(settings: FitSettings, score_map: ScoreMap, before: Outcomes, after: Outcomes) -> Calibration:
    """Describe a fitted map with the errors before and after."""
    return Calibration(
        method=settings.method,
        target=settings.target,
        a=score_map.a,
        b=score_map.b,
        d_ece=(before.errors.d_ece, after.errors.d_ece),
        la_ece=(before.errors.la_ece, after.errors.la_ece),
        images=before.images,
        detections=len(before.matched.scores),
        right=int(before.matched.right.sum()),
        best_threshold=after.best_threshold,
    )


def fitted(head: ScoreHead, outcomes: Outcomes, settings: FitSettings) -> ScoreMap:
    """Fit the maximum-likelihood map.

    A class gets the pair fitted to all classes if it has too few detections or its higher scores are not right more
    often.
    """
    require_both(outcomes.matched.right)
    matched = outcomes.matched if settings.target == "match" else outcomes.overlapping
    columns = outcomes.columns(matched)
    targets = matched.right.astype(np.float64) if settings.target == "match" else matched.ious
    if settings.method == "temperature":
        if outcomes.logits is None or head.background is None:
            raise CannotCalibrateError("calibrate: method temperature: expected a softmax over the classes")
        a, b = fit_softmax(outcomes.logits[matched.numbers], columns, targets, background=head.background)
        return ScoreMap((a,), (b,))
    common = fit_platt(logit(matched.scores), targets)
    if not settings.per_class:
        return ScoreMap(*((each,) for each in common))
    pairs = []
    for column in range(head.columns):
        own = columns == column
        pair = common
        if _enough(matched, own):
            with suppress(CannotCalibrateError):
                pair = fit_platt(logit(matched.scores[own]), targets[own])
        pairs.append(pair)
    return ScoreMap(*zip(*pairs, strict=True))


def _enough(matched: MatchedDetections, own: np.ndarray[Any, np.dtype[np.bool_]]) -> bool:
    right = int(matched.right[own].sum())
    return min(right, int(own.sum()) - right) >= MIN_COUNT and len(np.unique(matched.scores[own])) > 1


def _require_method(head: ScoreHead, method: CalibrationMethod) -> None:
    expected = {"sigmoid": "platt", "softmax": "temperature"}.get(head.link)
    if expected is None or (expected != method and method == "platt"):
        raise CannotCalibrateError(f"calibrate: the scores of this model cannot be calibrated: {unfoldable(head)}")
    if expected != method:
        raise CannotCalibrateError(
            "calibrate: method temperature: expected a softmax over the classes, got sigmoid scores; choose platt"
        )


def _require_folded(head: ScoreHead, samples: Samples, score_map: ScoreMap, before: Outcomes) -> None:
    """Raise unless the folded model's scores in the first image are those of the map; equal scores may swap places.

    With one pair per class, top-k limits across classes may keep other detections. Then only the best detection of each
    class is compared, for classes with detections before and after.
    """
    first = replace(samples, items=[before.first_item])  # a shuffling loader would give another image
    now, now_columns = collect(head, first).first_image
    _, columns = before.first_image
    expected = score_map(*before.first_image)
    if score_map.per_class:
        shared = sorted({*columns.tolist()} & {*now_columns.tolist()})
        now, expected = (
            np.array([scores[of == column].max() for column in shared])
            for scores, of in ((now, now_columns), (expected, columns))
        )
    compared = min(len(now), len(expected))
    differences = np.abs(np.sort(now)[::-1][:compared] - np.sort(expected)[::-1][:compared])
    coarse = head.layers[0].weight.dtype.itemsize < 4
    if differences.max(initial=0.0) > (COARSE_ROUNDING if coarse else ROUNDING):
        raise CannotCalibrateError(
            "calibrate: the scores of the folded model differ from the map by "
            f"{differences.max():.2g}; score_head() does not describe the model's last classification layers"
        )
