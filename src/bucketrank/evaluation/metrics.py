"""Metrics of matched detections: optimal LRP, calibration errors, precision and recall, and the best-F1 threshold."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

ERRORS = ("oLRP", "oLRP_loc", "oLRP_fp", "oLRP_fn")  # metrics for which lower is better
NUM_BINS = 25  # equal-width bins, as in the published LaECE code
OVERLAP = 1e-9  # the IoU from which LaECE matches: boxes that overlap at all


@dataclass(frozen=True)
class MatchedDetections:
    """The detections of all images that count as right or wrong; detections on a crowd are left out."""

    scores: Values  # (n,)
    labels: NDArray[np.int64]  # (n,) from 1
    ious: Values  # (n,) IoU with the matched object; 0 without one
    right: NDArray[np.bool_]  # (n,) True if the detection matched an object
    numbers: NDArray[np.int64]  # (n,) positions among all detections of the evaluator
    objects: NDArray[np.int64]  # (C,) objects per class, without crowds

    @property
    def curve(self) -> Curve:
        """Precision and recall by score over all classes together."""
        return Curve.of(scores=self.scores, right=self.right, objects=int(self.objects.sum()))


@dataclass(frozen=True)
class OptimalLRP:
    """The optimal Localisation-Recall-Precision error (Oksuz et al., TPAMI 2021), from 0 to 1; lower is better.

    For a class's detections with a score of at least s, matched at an IoU of tau,
    ``LRP(s) = (sum over TP of (1 - IoU) / (1 - tau) + FP + FN) / (TP + FP + FN)``. The threshold s with the lowest
    error counts. ``error`` is the mean over the classes that have objects, NaN if none has. The other three fields add
    up to ``error``.
    """

    error: float  # sum of the three parts
    localisation: float  # part due to inaccurate boxes
    false_positives: float  # part due to wrong detections
    false_negatives: float  # part due to missed objects

    @classmethod
    def of(cls, matched: MatchedDetections, *, tau: float = 0.5) -> OptimalLRP:
        """Compute the error of detections that were matched at an IoU of ``tau``."""
        classes = [
            _parts_of_class(matched, label, int(objects), tau)
            for label, objects in enumerate(matched.objects, start=1)
            if objects
        ]
        localisation, false_positives, false_negatives = np.mean(classes, axis=0) if classes else (np.nan,) * 3
        error = localisation + false_positives + false_negatives
        return cls(float(error), float(localisation), float(false_positives), float(false_negatives))

    def metrics(self) -> dict[str, float]:
        """Name the error and its parts as in the result tables."""
        return dict(zip(ERRORS, astuple(self), strict=True))


def _parts_of_class(matched: MatchedDetections, label: int, objects: int, tau: float) -> Values:
    """Split the lowest error of a class into localisation, false positives and false negatives."""
    own = matched.labels == label
    order = np.argsort(-matched.scores[own], kind="stable")
    scores, right, ious = matched.scores[own][order], matched.right[own][order], matched.ious[own][order]
    kept = np.concatenate([[0], _last_of_equal(scores) + 1])  # number of detections per threshold
    true_positives = np.concatenate([[0], np.cumsum(right)])[kept]
    localisation = np.concatenate([[0.0], np.cumsum(np.where(right, 1 - ious, 0) / (1 - tau))])[kept]
    parts = np.stack([localisation, kept - true_positives, objects - true_positives])
    parts = parts / (objects + kept - true_positives)  # TP + FP + FN
    best: Values = parts[:, int(parts.sum(0).argmin())]
    return best


def _last_of_equal(descending: Values) -> NDArray[np.intp]:
    """Find the last detection of each distinct score: a threshold keeps all detections with equal scores."""
    is_last = np.append(descending[:-1] != descending[1:], True)
    return np.flatnonzero(is_last[: len(descending)])


@dataclass(frozen=True)
class Reliability:
    """Mean score and mean outcome of the detections in each score bin; empty bins are left out."""

    counts: NDArray[np.int64]  # (bins,) detections
    scores: Values  # (bins,) mean scores
    outcomes: Values  # (bins,) mean outcomes

    @classmethod
    def of(cls, scores: Values, outcomes: Values, *, bins: int = NUM_BINS) -> Reliability:
        """Sort detections into ``bins`` intervals of equal width that include their upper end.

        >>> Reliability.of(np.array([0.1, 0.2, 0.9]), np.array([0.0, 1.0, 1.0]), bins=2).outcomes
        array([0.5, 1. ])
        """
        number = np.searchsorted(np.linspace(0, 1, bins + 1)[1:], scores, side="left").clip(max=bins - 1)
        counts = np.bincount(number, minlength=bins)
        used = counts > 0
        sums = [np.bincount(number, weights=values, minlength=bins)[used] for values in (scores, outcomes)]
        return cls(counts[used], *(each / counts[used] for each in sums))

    @property
    def error(self) -> float:
        """The mean distance between score and outcome, weighted by detections per bin; NaN without detections."""
        if not len(self.counts):
            return float("nan")
        return float((self.counts * np.abs(self.scores - self.outcomes)).sum() / self.counts.sum())


@dataclass(frozen=True)
class CalibrationErrors:
    """Two calibration errors from 0 to 1 (NaN without detections), and the bins behind ``d_ece``."""

    d_ece: float  # detection expected calibration error: scores against matches
    la_ece: float  # localisation-aware error: scores against IoUs, per class
    reliability: Reliability  # bins behind d_ece

    @classmethod
    def of(cls, matched: MatchedDetections, overlapping: MatchedDetections) -> CalibrationErrors:
        """Compute the errors from detections matched at an IoU of 0.5 and the same detections matched at any overlap.

        ``d_ece`` is the detection expected calibration error (Küppers et al., 2020) over all classes:
        ``sum_j n_j / n |mean score_j - share of right detections_j|``. ``la_ece`` is LaECE_0 (Kuzucu et al., "On
        Calibration of Object Detectors", ECCV 2024): the mean over the classes of the same sum with the IoU of the
        matched object, 0 without one, in place of right and wrong. Classes without objects or detections are left
        out. Both count detections of every score; the published LaECE code first drops low scores.
        """
        reliability = Reliability.of(matched.scores, matched.right.astype(np.float64))
        errors = []
        for label, objects in enumerate(overlapping.objects, start=1):
            own = overlapping.labels == label
            if objects and own.any():
                errors.append(Reliability.of(overlapping.scores[own], overlapping.ious[own]).error)
        return cls(reliability.error, float(np.mean(errors)) if errors else float("nan"), reliability)


@dataclass(frozen=True)
class Curve:
    """Precision and recall of the detections at or above each of the distinct ``scores``, in descending order.

    Recall is NaN if there are no objects.
    """

    scores: Values  # (n,) distinct scores in descending order
    precision: Values  # (n,) at or above each score
    recall: Values  # (n,) at or above each score

    @classmethod
    def of(cls, *, scores: Values, right: NDArray[np.bool_], objects: int) -> Curve:
        """Build the curve of detections that are ``right`` or not, for ``objects`` objects in total.

        >>> Curve.of(scores=np.array([0.1, 0.9, 0.9]), right=np.array([True, True, False]), objects=4).precision
        array([0.5       , 0.66666667])
        """
        order = np.argsort(-scores, kind="stable")
        descending = scores[order]
        last = _last_of_equal(descending)
        hits = np.cumsum(right[order])[last]
        recall = hits / objects if objects else np.full(len(hits), np.nan)
        return cls(descending[last], hits / (last + 1), recall)

    @property
    def f1(self) -> Values:
        """The harmonic mean of precision and recall; 0 where both are 0."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / np.where(total == 0, 1, total)


def best_threshold(curve: Curve) -> float:
    """Choose the minimum score to report: the midpoint between the best-F1 score of ``curve`` and the next lower score.

    The midpoint is used because scores in new images never equal those of the validation set exactly. If several scores
    reach the best F1, the highest counts. The result is NaN if no detection is right.
    """
    f1 = np.nan_to_num(curve.f1)
    if not len(f1) or f1.max() <= 0:
        return float("nan")
    best = int(f1.argmax())
    return float(curve.scores[best : best + 2].mean())
