"""Calibration errors: how far the scores of detections are from the share of them that is right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bucketrank.evaluation.matched_detections import MatchedDetections

BINS = 25  # of equal width, as in the published code of LaECE
OVERLAP = 1e-9  # the IoU from which LaECE matches: boxes that overlap at all

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Reliability:
    """Mean score and mean outcome of the detections in each bin of scores; bins without detections are left out."""

    counts: NDArray[np.int64]  # (bins,) detections
    scores: Values  # (bins,) mean scores
    outcomes: Values  # (bins,) mean outcomes

    @classmethod
    def of(cls, scores: Values, outcomes: Values, *, bins: int = BINS) -> Reliability:
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
        """The mean distance of score and outcome over the bins, weighted by their detections; NaN without any."""
        if not len(self.counts):
            return float("nan")
        return float((self.counts * np.abs(self.scores - self.outcomes)).sum() / self.counts.sum())


@dataclass(frozen=True)
class CalibrationErrors:
    """The two errors of a set of detections from 0 to 1 (NaN without detections), and the bins behind ``d_ece``."""

    d_ece: float  # detection expected calibration error: scores against matches
    la_ece: float  # localisation-aware error: scores against IoUs, per class
    reliability: Reliability  # the bins of d_ece

    @classmethod
    def of(cls, matched: MatchedDetections, overlapping: MatchedDetections) -> CalibrationErrors:
        """Return the errors of detections matched at an IoU of 0.5 and of the same detections matched at any overlap.

        ``d_ece`` is the detection expected calibration error (Küppers et al., 2020) over all classes:
        ``sum_j n_j / n |mean score_j - share of right detections_j|``. ``la_ece`` is LaECE_0 (Kuzucu et al., "On
        Calibration of Object Detectors", ECCV 2024): the mean over the classes of the same sum with the IoU of the
        matched object, 0 without one, in place of right and wrong. Classes without objects or detections are left
        out. Both count detections of every score, where the published code of LaECE first drops low scores.
        """
        reliability = Reliability.of(matched.scores, matched.right.astype(np.float64))
        errors = []
        for label, objects in enumerate(overlapping.objects, start=1):
            own = overlapping.labels == label
            if objects and own.any():
                errors.append(Reliability.of(overlapping.scores[own], overlapping.ious[own]).error)
        return cls(reliability.error, float(np.mean(errors)) if errors else float("nan"), reliability)
