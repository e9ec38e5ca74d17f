"""From which score on detections are shown.

Scores of a ranking loss are ranks, not probabilities: 0.5 means nothing. The threshold is chosen on the validation set
and stored with the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Precision and recall of the detections at or above each of the distinct ``scores``, which fall.

    Recall is NaN where there are no objects.
    """

    scores: Values
    precision: Values
    recall: Values

    @classmethod
    def of(cls, *, scores: Values, right: NDArray[np.bool_], objects: int) -> Curve:
        """The curve of detections that are ``right`` or not, among so many objects.

        >>> Curve.of(scores=np.array([0.1, 0.9, 0.9]), right=np.array([True, True, False]), objects=4).precision
        array([0.5       , 0.66666667])
        """
        order = np.argsort(-scores, kind="stable")
        falling = scores[order]
        last = np.flatnonzero(np.append(falling[:-1] != falling[1:], True)) if len(falling) else np.zeros(0, dtype=int)
        hits = np.cumsum(right[order])[last]
        recall = hits / objects if objects else np.full(len(hits), np.nan)
        return cls(falling[last], hits / (last + 1), recall)

    @property
    def f1(self) -> Values:
        """The harmonic mean of both; 0 where both are 0."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / np.where(total == 0, 1, total)


def best_threshold(curve: Curve) -> float:
    """The middle between the score of the best F1 and the next lower one.

    In the middle, because a new image's scores never meet the validation set's exactly. Of several best, the highest.
    Without any right detection there is no such score: NaN.
    """
    f1 = np.nan_to_num(curve.f1)
    if not len(f1) or f1.max() <= 0:
        return float("nan")
    at = int(f1.argmax())
    return float(curve.scores[at : at + 2].mean())
