"""Calibration of a detector: detect, fit, fold, verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from bucketrank.calibration.calibration_result import Calibration, Method, Target
from bucketrank.calibration.folding import KeptLayers, fold, fold_softmax, unfoldable
from bucketrank.calibration.likelihood_fit import LEAST_COUNT, fit_platt, fit_softmax, require_both
from bucketrank.calibration.outcomes import Outcomes, collect
from bucketrank.calibration.samples import Data, Samples
from bucketrank.calibration.score_head import CannotCalibrateError, ScoreHead
from bucketrank.calibration.score_map import ScoreMap, logit
from bucketrank.evaluation import MatchedDetections
from bucketrank.suggestions import require_choice

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
