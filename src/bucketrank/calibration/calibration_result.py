"""The outcome of a calibration: the map, the errors before and after, and the data behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from bucketrank.calibration.score_map import ScoreMap
from bucketrank.data.problems import counted

Target = Literal["match", "iou"]
Method = Literal["platt", "temperature"]


@dataclass(frozen=True)
class Calibration:
    """A fitted and folded calibration; the errors are those of the images it was fitted on.

    ``platt`` maps a score to ``sigmoid(a * logit + b)``. ``temperature`` divides the logits of a softmax by 1 / a and
    subtracts b from that of the background. ``target`` is ``match``, the probability of an IoU of at least 0.5 with an
    object, or ``iou``, the expected IoU.
    """

    method: Method  # platt or temperature
    target: Target  # match or iou
    a: tuple[float, ...]  # one for all classes, or one per class
    b: tuple[float, ...]  # as many numbers as a has
    d_ece: tuple[float, float]  # D-ECE before and after
    la_ece: tuple[float, float]  # LaECE before and after
    images: int  # number of images of the fit
    detections: int  # number of detections of the fit
    right: int  # number of detections that match an object at an IoU of 0.5
    best_threshold: float  # the calibrated score of the best F1 on these images

    @property
    def score_map(self) -> ScoreMap:
        """The pairs as a map of scores, for method ``platt``."""
        return ScoreMap(self.a, self.b)

    @property
    def keeps_order(self) -> bool:
        """Whether the detections of an image keep their order in all classes together."""
        return self.method == "platt" and len(self.a) == 1

    def threshold(self, score: float) -> float:
        """Return the minimum score that shows the same detections after calibration as ``score`` did before.

        No single score does so with a pair per class or after a temperature; then it is the score of the best F1 on
        the images of the fit.
        """
        if self.keeps_order:
            return self.score_map.threshold(score)
        return self.best_threshold if score > 0 else score

    def after(self, earlier: Calibration | None) -> Calibration:
        """Return the calibration from the trained logits on, if the logits had been calibrated before."""
        if earlier is None:
            return self
        count = max(len(self.a), len(earlier.a))
        a, b, first_a, first_b = (
            np.broadcast_to(np.array(each), (count,)) for each in (self.a, self.b, earlier.a, earlier.b)
        )
        return replace(self, a=tuple((a * first_a).tolist()), b=tuple((a * first_b + b).tolist()))

    def __str__(self) -> str:
        pairs = f"a {self.a[0]:.4g}, b {self.b[0]:.4g}" if len(self.a) == 1 else f"{len(self.a)} pairs, one per class"
        if self.method == "temperature":
            pairs = f"temperature {1 / self.a[0]:.4g}, background {-self.b[0]:+.4g}"
        return (
            f"{pairs}; on {counted(self.images, 'image')} D-ECE {self.d_ece[0]:.4f} -> {self.d_ece[1]:.4f}, "
            f"LaECE {self.la_ece[0]:.4f} -> {self.la_ece[1]:.4f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; :meth:`from_dict` reads them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Calibration:
        """Return the calibration that :meth:`to_dict` described; ValueError or TypeError if it is not valid."""
        values = dict(content)
        for name in ("a", "b", "d_ece", "la_ece"):
            values[name] = tuple(float(each) for each in values[name])
        for name in ("images", "detections", "right"):
            values[name] = int(values[name])
        values["best_threshold"] = float(values["best_threshold"])
        result = cls(**values)
        ScoreMap(result.a, result.b)
        known = result.method in get_args(Method) and result.target in get_args(Target)
        if not known or len(result.d_ece) != 2 or len(result.la_ece) != 2 or math.isnan(result.best_threshold):
            raise ValueError("expected a calibration with method, target and errors before and after")
        return result
