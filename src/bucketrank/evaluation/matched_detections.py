"""Detections with the outcome of their matching: which are right, and how well they lie on their object."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MatchedDetections:
    """The detections of all images that count as right or wrong; those on a crowd are left out."""

    scores: NDArray[np.float64]  # (n,)
    labels: NDArray[np.int64]  # (n,) from 1
    ious: NDArray[np.float64]  # (n,) with the object that the detection matched; 0 without one
    right: NDArray[np.bool_]  # (n,) whether it matched an object
    numbers: NDArray[np.int64]  # (n,) positions among all detections of the evaluator
    objects: NDArray[np.int64]  # (C,) number of objects of each class, without crowds
