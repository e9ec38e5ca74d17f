"""Optimal LRP: one error for localisation, false positives and misses at the best score threshold of each class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bucketrank.evaluation.matched_detections import MatchedDetections

ERRORS = ("oLRP", "oLRP_loc", "oLRP_fp", "oLRP_fn")  # the metrics of which the lowest is the best


@dataclass(frozen=True)
class OptimalLRP:
    """The optimal Localisation-Recall-Precision error (Oksuz et al., TPAMI 2021), from 0 to 1; lower is better.

    For the detections of a class with a score of at least s, matched at an IoU of tau,
    ``LRP(s) = (sum over TP of (1 - IoU) / (1 - tau) + FP + FN) / (TP + FP + FN)``. The threshold s with the lowest
    error counts. ``error`` is the mean over the classes that have objects, NaN if none has. The other fields are its
    three parts: they add up to ``error``.
    """

    error: float  # the sum of the three parts
    localisation: float  # part of badly localised boxes
    false_positives: float  # part of wrong detections
    false_negatives: float  # part of missed objects

    @classmethod
    def of(cls, matched: MatchedDetections, *, tau: float = 0.5) -> OptimalLRP:
        """Return the error of detections that were matched at an IoU of ``tau``."""
        classes = [
            _parts_of_class(matched, label, int(objects), tau)
            for label, objects in enumerate(matched.objects, start=1)
            if objects
        ]
        localisation, false_positives, false_negatives = np.mean(classes, axis=0) if classes else (np.nan,) * 3
        error = localisation + false_positives + false_negatives
        return cls(float(error), float(localisation), float(false_positives), float(false_negatives))

    def metrics(self) -> dict[str, float]:
        """Return the error and its parts by the names of their columns."""
        values = self.error, self.localisation, self.false_positives, self.false_negatives
        return dict(zip(ERRORS, values, strict=True))


def _parts_of_class(matched: MatchedDetections, label: int, objects: int, tau: float) -> tuple[float, float, float]:
    """Return the parts of the lowest error by localisation, false positives and false negatives."""
    own = matched.labels == label
    order = np.argsort(-matched.scores[own], kind="stable")
    scores, right, ious = matched.scores[own][order], matched.right[own][order], matched.ious[own][order]
    # A threshold keeps all detections of equal score, so only the last of them ends a list. The first list is empty.
    ends = np.flatnonzero(np.append(scores[:-1] != scores[1:], True)) if len(scores) else np.zeros(0, dtype=int)
    kept = np.concatenate([[0], ends + 1])
    true_positives = np.concatenate([[0], np.cumsum(right)])[kept]
    localisation = np.concatenate([[0.0], np.cumsum(np.where(right, 1 - ious, 0) / (1 - tau))])[kept]
    parts = np.stack([localisation, kept - true_positives, objects - true_positives])
    parts = parts / (objects + kept - true_positives)  # TP + FP + FN
    best = parts[:, int(parts.sum(0).argmin())]
    return float(best[0]), float(best[1]), float(best[2])
