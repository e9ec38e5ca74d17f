"""Images with ground truth, and the detections of a model in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bucketrank.data import CocoDataset, DataError, Split, eval_transform, find_splits, require_sound
from bucketrank.evaluation import CalibrationErrors, Evaluator, MatchedDetections
from bucketrank.evaluation.calibration.mapping import (
    LEAST_COUNT,
    Calibration,
    CannotCalibrateError,
    KeptLayers,
    Method,
    ScoreHead,
    ScoreMap,
    Target,
    fit_platt,
    fit_softmax,
    fold,
    fold_softmax,
    logit,
    require_both,
    unfoldable,
)
from bucketrank.evaluation.evaluator import LVIS_DETECTIONS
from bucketrank.evaluation.metrics import OVERLAP, Curve, best_threshold
from bucketrank.suggestions import require_choice

Detections = Mapping[str, Tensor]
Item = tuple[Any, Mapping[str, Any]]  # an image and its ground truth
Data = Path | str | Split | CocoDataset | Iterable[Any]


@dataclass(frozen=True)
class Samples:
    """Images with ground truth, one at a time, and a function that returns the detections in one image.

    A ground truth has ``boxes`` (n, 4) as corners, ``labels`` (n,) and, optionally, ``iscrowd``. With a ``split`` the
    ground truth is read from its file instead, crowds included, and a target only names its ``image_id``.
    """

    items: Iterable[Item]
    detect: Callable[[Any], Detections]
    split: Split | None = None

    @classmethod
    def of(cls, data: Data, detect: Callable[[Any], Detections], *, most: int | None) -> Samples:
        """Read ``data``: a folder (its training split), a split, or images or batches with their targets.

        At most ``most`` images are used. Of a folder or a split they are evenly spread; otherwise they are the first.
        """
        if isinstance(data, Path | str):
            splits = find_splits(data)
            chosen = splits.train or splits.val
            if chosen is None:
                raise DataError(f"{data}: expected annotations for training or validation, got none")
            data = chosen
        if isinstance(data, Split):
            require_sound(data, masks=False)
            data = CocoDataset(data, transform=eval_transform())
        if isinstance(data, CocoDataset):
            return cls(SpreadImages(data, most), detect, data.split)
        images = FirstImages(data, most)
        return cls(list(images) if isinstance(data, Iterator) else images, detect)  # a fit may read them twice


@dataclass(frozen=True)
class SpreadImages:
    """Up to ``most`` images at equal distances in a data set."""

    images: CocoDataset
    most: int | None

    def __iter__(self) -> Iterator[Item]:
        total = len(self.images)
        count = total if self.most is None else min(self.most, total)
        return (self.images[number * total // count] for number in range(count))


@dataclass(frozen=True)
class FirstImages:
    """The first ``most`` images of an iterable of pairs (image, target), single or in batches."""

    items: Iterable[Any]
    most: int | None

    def __iter__(self) -> Iterator[Item]:
        count = 0
        for images, targets in self.items:
            batched = isinstance(targets, list | tuple)
            for item in zip(images, targets, strict=True) if batched else [(images, targets)]:
                if self.most is not None and count >= self.most:
                    return
                count += 1
                yield item


# Detections of a model on images with ground truth, matched by COCO's rule.


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


# Calibration of a detector: detect, fit, fold, verify.


MOST_IMAGES = 500
ROUNDING = 2e-3  # a score of the folded model and the score by the map differ by no more in float32
COARSE_ROUNDING = 0.05  # in float16 and bfloat16


@runtime_checkable
class HasScoreHead(Protocol):
    """A detector that describes the head behind its scores."""

    def score_head(self) -> ScoreHead:
        """Return the description."""


@dataclass(frozen=True)
class FitSettings:
    """The target of the fit, whether each class has a pair of its own, and the method, which depends on the head."""

    target: Target = "match"
    per_class: bool = False
    method: Method = "platt"

    def __post_init__(self) -> None:
        require_choice("calibrate: target", self.target, get_args(Target))
        require_choice("calibrate: method", self.method, get_args(Method))
        if self.per_class and self.method == "temperature":
            raise ValueError("calibrate: per_class: expected False with method temperature, which classes share")


def calibrate(
    model: nn.Module,
    data: Data,
    *,
    target: Target = "match",
    per_class: bool = False,
    method: Method = "platt",
    most: int | None = MOST_IMAGES,
) -> Calibration:
    """Turn the scores of a detector into probabilities, in place, and return the fitted map with its errors.

    ``model`` is a detector of bucketrank; for models of torchvision and transformers call ``calibrate`` of
    ``bucketrank.integrations``. ``data`` is a data folder (its training split is used), a split, or an iterable of
    pairs (image, target) as detectors take them, single or in batches. At most ``most`` images are used.

    The detections are matched to the ground truth by COCO's rule at an IoU of 0.5. With ``method="platt"``,
    ``p = sigmoid(a * logit + b)`` with a > 0 is fitted and folded into the last classification layer: ``weight * a``
    and ``bias * a + b``. The order of the detections of an image stays, and so do NMS and AP. ``target="iou"`` fits
    the expected IoU instead of the probability of a match. ``per_class`` fits a pair for each class with enough
    detections: the order within a class stays, but limits that compare classes (the best 100 of an image) may keep
    others. Minimum scores stored in the model are mapped with the scores.

    A softmax over the classes needs ``method="temperature"``: the logits are divided by a temperature and that of the
    background is shifted. The order of detections may change slightly.

    Raises CannotCalibrateError, and leaves the model as it was, for scores that are products with a predicted quality,
    for too few right or wrong detections, and if higher scores are not right more often.

    Args:
        model: a detector of bucketrank.
        data: data folder, split, or pairs of image and target.
        target: ``"match"``, the probability of an IoU of at least 0.5 with an object, or ``"iou"``, the expected IoU.
        per_class: fit each class on its own.
        method: ``"platt"`` for sigmoid scores, ``"temperature"`` for a softmax.
        most: maximum number of images; None for all.
    """
    settings = FitSettings(target, per_class, method)
    if not isinstance(model, HasScoreHead):
        raise TypeError(
            f"calibrate: expected a detector of bucketrank, got {type(model).__name__}; for models of torchvision or "
            "transformers use calibrate of bucketrank.integrations.torchvision or .transformers"
        )
    device = next(model.parameters()).device

    def detect(image: Tensor) -> Mapping[str, Tensor]:
        (detections,) = model([image.to(device)])
        return detections  # type: ignore[no-any-return]

    calibration = calibrate_head(model, model.score_head(), Samples.of(data, detect, most=most), settings)
    model.stored_threshold = calibration.threshold(float(getattr(model, "stored_threshold", 0.0)))  # type: ignore[assignment]
    return calibration


@torch.inference_mode(mode=False)  # the fit needs gradients
def calibrate_head(model: nn.Module, head: ScoreHead, samples: Samples, settings: FitSettings) -> Calibration:
    """Fit and fold the calibration of a model whose head is described; its modules keep their modes."""
    _require_method(head, settings.method)
    kept = KeptLayers(head)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    shuffling = torch.random.get_rng_state()
    try:
        # Autocast would round the scores, and keep copies of the weights from before they are folded.
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            before = collect(head, samples)
            score_map = fitted(head, before, settings)
            if settings.method == "platt":
                fold(head, score_map)
                after = before.mapped(score_map)
                _require_folded(head, samples, score_map, before)
            else:
                fold_softmax(head, score_map.a[0], score_map.b[0])
                torch.random.set_rng_state(shuffling)  # so that a loader that shuffles gives the same images again
                after = collect(head, samples)
    except BaseException:
        kept.restore()
        raise
    finally:
        for module, mode in modes.items():
            module.training = mode
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


@torch.inference_mode(mode=False)
def fit(
    detections: Sequence[Mapping[str, Tensor]],
    ground_truths: Sequence[Mapping[str, Any]],
    *,
    num_classes: int,
    first_label: int = 1,
    target: Target = "match",
    per_class: bool = False,
) -> ScoreMap:
    """Return the map for detections and ground truths of the same images, from any detector with sigmoid scores.

    Both are dicts per image as torchvision has them: ``boxes`` (n, 4) as corners, ``labels`` (n,), ``scores`` (n,) and,
    optionally, ``iscrowd`` of the ground truth. Labels are from ``first_label`` on. Give the map and the last
    classification layers to :func:`fold`.

    Args:
        detections: boxes, labels and scores per image.
        ground_truths: boxes and labels per image.
        num_classes: number of classes of objects.
        first_label: label of the first class.
        target: ``"match"``, the probability of an IoU of at least 0.5 with an object, or ``"iou"``, the expected IoU.
        per_class: fit each class on its own.
    """
    settings = FitSettings(target, per_class)
    head = ScoreHead("other", columns=num_classes, first_label=first_label)
    items = list(zip(detections, ground_truths, strict=True))
    return fitted(head, collect(head, Samples(items, detect=lambda each: each)), settings)


def fitted(head: ScoreHead, outcomes: Outcomes, settings: FitSettings) -> ScoreMap:
    """Return the map of highest likelihood.

    A class with too few detections takes the pair of all classes, and so does one whose higher scores are not right
    more often.
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
    return min(right, int(own.sum()) - right) >= LEAST_COUNT and len(np.unique(matched.scores[own])) > 1


def _require_method(head: ScoreHead, method: Method) -> None:
    expected = {"sigmoid": "platt", "softmax": "temperature"}.get(head.link)
    if expected is None or (expected != method and method == "platt"):
        raise CannotCalibrateError(f"calibrate: the scores of this model cannot be calibrated: {unfoldable(head)}")
    if expected != method:
        raise CannotCalibrateError(
            "calibrate: method temperature: expected a softmax over the classes, got sigmoid scores; choose platt"
        )


def _require_folded(head: ScoreHead, samples: Samples, score_map: ScoreMap, before: Outcomes) -> None:
    """Raise unless the folded model gives the first image the scores of the map, whatever the order of equal ones.

    With a pair per class, limits that compare classes may keep other detections, so that only the best detection of
    each class is compared that has one before and after.
    """
    first = replace(samples, items=[before.first_item])  # a loader that shuffles would give another image
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
            f"{differences.max():.2g}; score_head() of this model does not describe its last classification layers"
        )
