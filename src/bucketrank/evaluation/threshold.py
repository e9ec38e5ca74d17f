"""Choice of the minimum score to report.

A ranking loss orders the scores but does not make them probabilities, so that a fixed threshold such as 0.5 has no
meaning. The threshold is chosen on the validation set and stored with the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Precision and recall of the detections at or above each of the distinct ``scores``, in descending order.

    Recall is NaN if there are no objects.
    """

    scores: Values  # (n,) in descending order
    precision: Values  # (n,) at or above each score
    recall: Values  # (n,) at or above each score

    @classmethod
    def of(cls, *, scores: Values, right: NDArray[np.bool_], objects: int) -> Curve:
        """Return the curve of detections that are ``right`` or not, for ``objects`` objects in total.

        >>> Curve.of(scores=np.array([0.1, 0.9, 0.9]), right=np.array([True, True, False]), objects=4).precision
        array([0.5       , 0.66666667])
        """
        order = np.argsort(-scores, kind="stable")
        descending = scores[order]
        last = (
            np.flatnonzero(np.append(descending[:-1] != descending[1:], True))
            if len(descending)
            else np.zeros(0, dtype=int)
        )
        hits = np.cumsum(right[order])[last]
        recall = hits / objects if objects else np.full(len(hits), np.nan)
        return cls(descending[last], hits / (last + 1), recall)

    @property
    def f1(self) -> Values:
        """The harmonic mean of precision and recall; 0 where both are 0."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / np.where(total == 0, 1, total)


def best_threshold(curve: Curve) -> float:
    """Return the midpoint between the score of the best F1 and the next lower score.

    The midpoint, because the scores of new images never equal those of the validation set exactly. If several scores
    reach the best F1, the highest counts. Return NaN if no detection is right.

    Args:
        curve: precision and recall by score.
    """
    f1 = np.nan_to_num(curve.f1)
    if not len(f1) or f1.max() <= 0:
        return float("nan")
    best = int(f1.argmax())
    return float(curve.scores[best : best + 2].mean())
