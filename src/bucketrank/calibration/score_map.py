"""The map from scores to calibrated scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-7  # a score of exactly 0 or 1 has no finite logit


@dataclass(frozen=True)
class ScoreMap:
    """Calibrated score ``sigmoid(a * logit(score) + b)``, with one pair for all columns or a pair for each.

    Every ``a`` is above 0, so that the order of the scores of a class stays.

    >>> round(ScoreMap((2.0,), (1.0,)).threshold(0.5), 4)  # logit 0, sigmoid of 1
    0.7311
    """

    a: tuple[float, ...]  # factors on the logits
    b: tuple[float, ...]  # shifts of the logits

    def __post_init__(self) -> None:
        finite = all(map(math.isfinite, (*self.a, *self.b)))
        if not self.a or len(self.a) != len(self.b) or not finite or min(self.a) <= 0:
            raise ValueError(f"ScoreMap: expected finite pairs with a above 0, got a {self.a} and b {self.b}")

    @property
    def per_class(self) -> bool:
        """Whether each column has a pair of its own."""
        return len(self.a) > 1

    def __call__(self, scores: NDArray[np.float64], columns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the calibrated scores of detections of the classes in ``columns``, counted from 0."""
        pair = columns if self.per_class else np.zeros_like(columns)
        logits = np.asarray(self.a)[pair] * logit(scores) + np.asarray(self.b)[pair]
        return sigmoid(logits)

    @property
    def inverse(self) -> ScoreMap:
        """The map from calibrated scores back."""
        return ScoreMap(tuple(1 / a for a in self.a), tuple(-b / a for a, b in zip(self.a, self.b, strict=True)))

    def threshold(self, score: float) -> float:
        """Return the minimum calibrated score of the same detections; 0 and 1 stay.

        With a pair for each column it is the lowest of their thresholds.
        """
        if not 0 < score < 1:
            return score
        everywhere = np.arange(len(self.a))
        return float(self(np.full(len(self.a), score), everywhere).min())


def logit(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log-odds of scores; 0 and 1 are moved inward by EPSILON at most."""
    clipped = np.clip(np.asarray(scores, dtype=np.float64), 1e-30, 1 - EPSILON)
    return np.log(clipped) - np.log1p(-clipped)


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the scores of logits, without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits))
