"""Score maps: the description of a detector's last layers, the map, its maximum-likelihood fit, and its folding."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bucketrank.data.problems import counted
from bucketrank.errors import CannotCalibrateError, DataError
from bucketrank.settings.choices import CalibrationMethod, CalibrationTarget

Layer = nn.Linear | nn.Conv2d
Link = Literal["sigmoid", "softmax", "other"]
Values = NDArray[np.float64]

EPSILON = 1e-7  # a score of exactly 0 or 1 has no finite logit
MIN_COUNT = 10  # right detections, and wrong detections, that a fit needs
MIN_SLOPE = 1e-3  # below it, scores say nothing about right and wrong
MAX_STEPS = 200
UNCHANGED = 1e-3  # a map this close to the identity is said to leave the scores unchanged
CALIBRATION_FORMAT = "calibration 1"  # marks the file of a calibration
SOFTMAX = (
    "its classes share a softmax, into which a map of single scores cannot be folded; choose method temperature, which "
    "may change the order of detections slightly"
)


@dataclass(frozen=True)
class ScoreHead:
    """A detector's last classification layers, and how their logits become scores.

    ``link`` says how logits become scores: ``"sigmoid"`` of each logit, ``"softmax"`` with a background, or
    ``"other"``, such as a product with a predicted quality; ``reason`` then says why scores cannot be calibrated.

    The logits are the outputs of ``layers``, averaged if there are several. A layer has ``columns`` outputs per
    candidate, the classes of an anchor next to each other; the class with the label ``first_label`` comes first. The
    outputs of ``summands`` are added to the logits. A softmax has the column ``background``, and the outputs of
    ``logits`` (by default ``layers``) end in a dimension of ``columns``. ``thresholds`` lists (object, attribute name)
    pairs that hold a minimum score.
    """

    link: Link
    layers: tuple[Layer, ...] = ()
    columns: int = 1
    first_label: int = 1
    summands: tuple[Layer, ...] = ()
    background: int | None = None
    logits: tuple[nn.Module, ...] = ()
    thresholds: tuple[tuple[Any, str], ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        if self.link == "other":
            return
        for layer in (*self.layers, *self.summands):
            if not isinstance(layer, nn.Linear | nn.Conv2d) or layer.bias is None:
                raise TypeError(f"ScoreHead: expected linear or convolutional layers with a bias, got {layer}")
        for layer in self.layers:
            if layer.weight.shape[0] % self.columns:
                raise ValueError(
                    f"ScoreHead: expected layers with a multiple of {self.columns} outputs, got {layer.weight.shape[0]}"
                )
        if not self.layers or (self.link == "softmax") != (self.background is not None):
            raise ValueError("ScoreHead: expected layers, and a background column for a softmax only")

    @property
    def sources(self) -> tuple[nn.Module, ...]:
        """The modules whose outputs, averaged if there are several, are the logits."""
        return self.logits or self.layers


@dataclass(frozen=True)
class ScoreMap:
    """Calibrated score ``sigmoid(a * logit(score) + b)``, with one pair (a, b) for all columns or one per column.

    Every ``a`` is above 0, so the scores of a class keep their order.

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
        """Whether each column has its own pair."""
        return len(self.a) > 1

    def __call__(self, scores: Values, columns: NDArray[np.int64]) -> Values:
        """Calibrate the scores of detections whose classes are ``columns``, counted from 0."""
        pair = columns if self.per_class else np.zeros_like(columns)
        logits = np.asarray(self.a)[pair] * logit(scores) + np.asarray(self.b)[pair]
        return sigmoid(logits)

    @property
    def inverse(self) -> ScoreMap:
        """The map from calibrated scores back to the original ones."""
        return ScoreMap(tuple(1 / a for a in self.a), tuple(-b / a for a, b in zip(self.a, self.b, strict=True)))

    def threshold(self, score: float) -> float:
        """Map a minimum score to the one that keeps the same detections; 0 and 1 stay.

        With one pair per column, the result is the lowest of their thresholds.
        """
        if not 0 < score < 1:
            return score
        everywhere = np.arange(len(self.a))
        return float(self(np.full(len(self.a), score), everywhere).min())


def logit(scores: Values) -> Values:
    """Compute the log-odds of scores; 0 and 1 are moved inward by EPSILON at most."""
    clipped = np.clip(np.asarray(scores, dtype=np.float64), 1e-30, 1 - EPSILON)
    return np.log(clipped) - np.log1p(-clipped)


def sigmoid(logits: Values) -> Values:
    """Compute the sigmoid without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits))


def require_both(right: NDArray[np.bool_]) -> None:
    """Raise CannotCalibrateError unless enough detections are right and enough are wrong."""
    count = int(right.sum())
    wrong = len(right) - count
    if min(count, wrong) < MIN_COUNT:
        raise CannotCalibrateError(
            f"calibrate: expected at least {MIN_COUNT} detections that are right and {MIN_COUNT} that are wrong, "
            f"got {count} and {wrong}; train for longer, or give more images"
        )


def smoothed(targets: Values) -> Values:
    """Move targets inward, so that the fit stays finite if scores separate right from wrong (Platt, 1999).

    With p right and n wrong detections, 1 becomes (p + 1) / (p + 2) and 0 becomes 1 / (n + 2).
    """
    right = targets.sum()
    high, low = float((right + 1) / (right + 2)), float(1 / (len(targets) - right + 2))
    moved: Values = low + targets * (high - low)
    return moved


def fit_platt(logits: Values, targets: Values) -> tuple[float, float]:
    """Fit ``sigmoid(a * logit + b)`` with a above 0 by maximum likelihood; ``targets`` are from 0 to 1. Return (a, b).

    Raises CannotCalibrateError if higher scores are not right more often.

    >>> a, b = fit_platt(np.array([-3.0, -2, -1] * 50), np.array([0.0, 0, 1] * 25 + [0.0, 1, 1] * 25))
    >>> a > 0 and b > 0
    True
    """
    mean, spread = float(logits.mean()), float(logits.std())
    if spread == 0:
        raise CannotCalibrateError("calibrate: expected detections with different scores, got equal ones")
    scaled = torch.from_numpy((logits - mean) / spread)
    labels = torch.from_numpy(smoothed(targets))

    def loss(log_slope: Tensor, shift: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(log_slope.exp() * scaled + shift, labels)

    slope, shift = _minimised(loss)
    return slope / spread, shift - slope * mean / spread


def fit_softmax(logits: Values, columns: NDArray[np.int64], targets: Values, *, background: int) -> tuple[float, float]:
    """Fit the softmax of ``a * logits``, with ``b`` subtracted from the background, by maximum likelihood.

    ``logits`` is (n, C + 1) and ``columns`` (n,) the class of each detection. Returns (a, b); the temperature is 1 / a.
    """
    rows, labels = torch.from_numpy(logits), torch.from_numpy(smoothed(targets))
    own = torch.from_numpy(columns)[:, None]
    is_own = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, own, 1)
    is_background = torch.zeros(rows.shape[1], dtype=rows.dtype)
    is_background[background] = 1

    def loss(log_slope: Tensor, shift: Tensor) -> Tensor:
        moved = log_slope.exp() * rows - shift * is_background
        others = moved.masked_fill(is_own, -torch.inf).logsumexp(1)
        return F.binary_cross_entropy_with_logits(moved.gather(1, own)[:, 0] - others, labels)

    return _minimised(loss)


def _minimised(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float]:
    """Minimise over the logarithm of a and over b, from a = 1 and b = 0, and return a and b."""
    with torch.enable_grad():
        values = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS(
            [values], max_iter=MAX_STEPS, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )

        def evaluate() -> Tensor:
            optimiser.zero_grad()
            value = loss(values[0], values[1])
            value.backward()
            return value

        optimiser.step(evaluate)
    log_slope, shift = values.tolist()
    slope = float(np.exp(log_slope))
    if not np.isfinite([slope, shift]).all() or slope < MIN_SLOPE:
        raise CannotCalibrateError(
            "calibrate: expected detections that are right more often the higher their score is; these are not, so "
            "that no rising map fits; train for longer"
        )
    return slope, shift


@torch.no_grad()
def fold(head: ScoreHead, score_map: ScoreMap) -> None:
    """Fold ``score_map`` into the layers of the sigmoid ``head`` in place: ``weight * a`` and ``bias * a + b``.

    The arithmetic is in float64; the result is rounded once to the layer's dtype. Minimum scores in
    ``head.thresholds`` are also mapped, so that the same detections pass them.
    """
    if head.link != "sigmoid":
        raise CannotCalibrateError(f"fold: expected a head with sigmoid scores, got another: {unfoldable(head)}")
    if score_map.per_class and len(score_map.a) != head.columns:
        raise ValueError(f"fold: expected one pair or {head.columns}, one per class, got {len(score_map.a)}")
    if any(layer.weight.shape[0] % len(score_map.a) for layer in head.summands):
        raise CannotCalibrateError(
            "fold: expected one pair for all classes, got one per class; the logits of this model have a summand that "
            "all classes share"
        )
    for layer in _distinct(head.layers):
        _scale(layer, _per_output(score_map.a, layer), _per_output(score_map.b, layer))
    for layer in _distinct(head.summands):
        _scale(layer, _per_output(score_map.a, layer), torch.zeros(layer.weight.shape[0], dtype=torch.float64))
    torch.clear_autocast_cache()  # it holds copies of the old weights
    for owner, name in head.thresholds:
        setattr(owner, name, score_map.threshold(float(getattr(owner, name))))


@torch.no_grad()
def fold_softmax(head: ScoreHead, a: float, b: float) -> None:
    """Scale all logits of a softmax head by ``a`` in place, and subtract ``b`` from the background logit."""
    if head.link != "softmax" or head.background is None:
        raise CannotCalibrateError(f"fold_softmax: expected a softmax head, got a head with link {head.link!r}")
    shifts = [0.0] * head.columns
    shifts[head.background] = -b
    for layer in _distinct(head.layers):
        _scale(layer, _per_output((a,), layer), _per_output(shifts, layer))
    torch.clear_autocast_cache()


def unfoldable(head: ScoreHead) -> str:
    """Explain why a map of single scores cannot be folded into this head."""
    return SOFTMAX if head.link == "softmax" else head.reason


@contextmanager
def restored_on_error(head: ScoreHead) -> Iterator[None]:
    """Restore the layers and thresholds of a head if the block raises."""
    states = [(layer, copy.deepcopy(layer.state_dict())) for layer in (*head.layers, *head.summands)]
    thresholds = [(owner, name, getattr(owner, name)) for owner, name in head.thresholds]
    try:
        yield
    except BaseException:
        for layer, state in states:
            layer.load_state_dict(state)
        for owner, name, value in thresholds:
            setattr(owner, name, value)
        raise


def _distinct(layers: Iterable[Layer]) -> list[Layer]:
    """Drop repeated layers: decoder layers may share one, under one or several names."""
    return list({id(layer.weight): layer for layer in layers}.values())


def _per_output(values: Iterable[float], layer: Layer) -> Tensor:
    """Repeat one value per class for each anchor, because a layer's outputs list the classes anchor by anchor."""
    once = torch.tensor(list(values), dtype=torch.float64)
    return once.repeat(layer.weight.shape[0] // len(once))


def _scale(layer: Layer, factors: Tensor, shifts: Tensor) -> None:
    weight, bias = layer.weight, layer.bias
    if bias is None:
        raise TypeError(f"fold: expected a layer with a bias, got {layer}")
    factors, shifts = factors.to(weight.device), shifts.to(weight.device)
    weight.copy_(weight.double() * factors.reshape(-1, *[1] * (weight.dim() - 1)))
    bias.copy_(bias.double() * factors + shifts)


@dataclass(frozen=True)
class Calibration:
    """A fitted calibration; the errors are measured on the images of the fit.

    ``platt`` maps a score to ``sigmoid(a * logit + b)``. ``temperature`` divides the logits of a softmax by 1 / a and
    subtracts b from the background logit. ``target`` is ``match``, the probability that a detection overlaps an object
    with an IoU of at least 0.5, or ``iou``, the expected IoU.
    """

    method: CalibrationMethod  # platt or temperature
    target: CalibrationTarget  # match or iou
    a: tuple[float, ...]  # one for all classes, or one per class
    b: tuple[float, ...]  # same length as a
    d_ece: tuple[float, float]  # D-ECE before and after
    la_ece: tuple[float, float]  # LaECE before and after
    images: int  # number of images
    detections: int  # number of detections
    right: int  # number of detections that match an object at an IoU of 0.5
    best_threshold: float  # calibrated score with the best F1 on these images

    @property
    def score_map(self) -> ScoreMap:
        """The pairs as a score map, for method ``platt``."""
        return ScoreMap(self.a, self.b)

    @property
    def keeps_order(self) -> bool:
        """Whether the detections in an image keep their order across classes."""
        return self.method == "platt" and len(self.a) == 1

    def __call__(self, scores: Any, labels: Any = None) -> Any:
        """Calibrate ``scores``: a number, a sequence, an array or a tensor, which is also what is returned.

        ``labels``, one per score, are needed with one pair per class; they index the pairs.
        """
        if self.method != "platt":
            raise ValueError("Calibration: expected method platt, whose map needs single scores only, got temperature")
        if len(self.a) > 1 and labels is None:
            raise ValueError(f"Calibration: expected labels for its {len(self.a)} pairs, one per class, got none")
        values = scores.detach().cpu().double().numpy() if isinstance(scores, Tensor) else np.asarray(scores, float)
        given = np.zeros_like(values) if labels is None else torch.as_tensor(labels).cpu().numpy()
        columns = given.astype(np.int64)
        if len(self.a) > 1 and columns.size and not 0 <= columns.min() <= columns.max() < len(self.a):
            raise ValueError(
                f"Calibration: expected labels from 0 to {len(self.a) - 1}, got {columns.min()} to {columns.max()}"
            )
        mapped = self.score_map(values, columns)
        if isinstance(scores, Tensor):
            return torch.from_numpy(mapped).to(scores)
        return float(mapped) if mapped.ndim == 0 else mapped

    def save(self, path: Path | str) -> None:
        """Write the calibration to the JSON file ``path``."""
        text = json.dumps({"bucketrank": CALIBRATION_FORMAT, **self.to_dict()}, indent=2) + "\n"
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> Calibration:
        """Read the file ``path`` of :meth:`save`; DataError if it is not one. Nothing in it is executed."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls.from_dict({key: value for key, value in content.items() if key != "bucketrank"})
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}: expected a calibration written by Calibration.save, got another file ({error!s:.100})"
            ) from error

    def threshold(self, score: float) -> float:
        """Map a minimum score to the one that keeps the same detections after calibration.

        No single score does so with one pair per class or with a temperature; the result is then the best-F1 score on
        the images of the fit.
        """
        if self.keeps_order:
            return self.score_map.threshold(score)
        return self.best_threshold if score > 0 else score

    def after(self, earlier: Calibration | None) -> Calibration:
        """Combine this calibration with an ``earlier`` one, so that the result starts from the trained logits."""
        if earlier is None:
            return self
        count = max(len(self.a), len(earlier.a))
        a, b, first_a, first_b = (
            np.broadcast_to(np.array(each), (count,)) for each in (self.a, self.b, earlier.a, earlier.b)
        )
        return replace(
            self,
            a=tuple((a * first_a).tolist()),
            b=tuple((a * first_b + b).tolist()),
            d_ece=(earlier.d_ece[0], self.d_ece[1]),
            la_ece=(earlier.la_ece[0], self.la_ece[1]),
        )

    def __str__(self) -> str:
        (a, *others), b = self.a, self.b[0]
        if np.allclose(self.a, 1, atol=UNCHANGED) and np.allclose(self.b, 0, atol=UNCHANGED):
            change = "scores unchanged"
        elif self.method == "temperature":
            change = f"temperature {1 / a:.4g}, background {-b:+.4g}"
        elif others:
            change = f"{len(self.a)} maps, one per class"
        else:
            change = f"p = sigmoid({a:.4g} logit {b:+.4g})"
        return (
            f"{change}; on {counted(self.images, 'image')} D-ECE {self.d_ece[0]:.4f} -> {self.d_ece[1]:.4f}, "
            f"LaECE {self.la_ece[0]:.4f} -> {self.la_ece[1]:.4f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON, which :meth:`from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Calibration:
        """Rebuild a calibration from :meth:`to_dict`; raise ValueError or TypeError if it is not valid."""
        values = dict(content)
        for name in ("a", "b", "d_ece", "la_ece"):
            values[name] = tuple(float(each) for each in values[name])
        for name in ("images", "detections", "right"):
            values[name] = int(values[name])
        values["best_threshold"] = float(values["best_threshold"])
        result = cls(**values)
        ScoreMap(result.a, result.b)
        known = result.method in get_args(CalibrationMethod) and result.target in get_args(CalibrationTarget)
        if not known or len(result.d_ece) != 2 or len(result.la_ece) != 2 or math.isnan(result.best_threshold):
            raise ValueError("expected a calibration with method, target and errors before and after")
        return result
