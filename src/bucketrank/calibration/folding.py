"""Folding of a calibration into the last classification layers, so that every framework sees calibrated scores."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bucketrank.calibration.score_head import CannotCalibrateError, Layer, ScoreHead
from bucketrank.calibration.score_map import ScoreMap

SOFTMAX = (
    "its classes share a softmax, into which a map of single scores cannot be folded; choose method temperature, which "
    "may change the order of detections slightly"
)


@torch.no_grad()
def fold(head: ScoreHead, score_map: ScoreMap) -> None:
    """Change the layers of a sigmoid head in place: ``weight * a`` and ``bias * a + b``.

    The arithmetic is in float64 and the result is rounded once to the dtype of the layer. Minimum scores in
    ``head.thresholds`` are mapped, too, so that the same detections pass them.

    Args:
        head: the last classification layers and their minimum scores.
        score_map: the map to fold in.
    """
    if head.link != "sigmoid":
        raise CannotCalibrateError(f"fold: expected a head with sigmoid scores, got another: {unfoldable(head)}")
    if score_map.per_class and len(score_map.a) != head.columns:
        raise ValueError(f"fold: expected one pair or {head.columns}, one per class, got {len(score_map.a)}")
    if any(layer.weight.shape[0] % len(score_map.a) for layer in head.summands):
        raise CannotCalibrateError(
            "fold: the logits of this model have a summand that all classes share; fit one pair for all classes"
        )
    for layer in _distinct(head.layers):
        _scale(layer, _per_output(score_map.a, layer), _per_output(score_map.b, layer))
    for layer in _distinct(head.summands):
        _scale(layer, _per_output(score_map.a, layer), torch.zeros(layer.weight.shape[0], dtype=torch.float64))
    torch.clear_autocast_cache()  # its copies of the weights are old now
    for owner, name in head.thresholds:
        setattr(owner, name, score_map.threshold(float(getattr(owner, name))))


@torch.no_grad()
def fold_softmax(head: ScoreHead, a: float, b: float) -> None:
    """Change the layers of a softmax head in place: all logits times ``a``, and the background's less ``b``."""
    if head.link != "softmax" or head.background is None:
        raise CannotCalibrateError(f"fold_softmax: expected a softmax head, got a head with link {head.link!r}")
    shifts = [0.0] * head.columns
    shifts[head.background] = -b
    for layer in _distinct(head.layers):
        _scale(layer, _per_output((a,), layer), _per_output(shifts, layer))
    torch.clear_autocast_cache()


def unfoldable(head: ScoreHead) -> str:
    """Return why a map of single scores cannot be folded into this head."""
    return SOFTMAX if head.link == "softmax" else head.reason


class KeptLayers:
    """A copy of the layers and thresholds of a head, to restore them if a calibration fails."""

    def __init__(self, head: ScoreHead) -> None:
        layers = [*head.layers, *head.summands]
        self._states = [(layer, {k: v.clone() for k, v in layer.state_dict().items()}) for layer in layers]
        self._thresholds = [(owner, name, getattr(owner, name)) for owner, name in head.thresholds]

    def restore(self) -> None:
        """Give layers and thresholds their former values."""
        for layer, state in self._states:
            layer.load_state_dict(state)
        for owner, name, value in self._thresholds:
            setattr(owner, name, value)


def _distinct(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers without repetition: decoder layers may share one, under one name or several."""
    return list({id(layer.weight): layer for layer in layers}.values())


def _per_output(values: Iterable[float], layer: Layer) -> Tensor:
    """Return a value per output of a layer whose outputs are the classes of one anchor after the other."""
    once = torch.tensor(list(values), dtype=torch.float64)
    return once.repeat(layer.weight.shape[0] // len(once))


def _scale(layer: Layer, factors: Tensor, shifts: Tensor) -> None:
    weight, bias = layer.weight, layer.bias
    if bias is None:
        raise TypeError(f"fold: expected a layer with a bias, got {layer}")
    factors, shifts = factors.to(weight.device), shifts.to(weight.device)
    weight.copy_(weight.double() * factors.reshape(-1, *[1] * (weight.dim() - 1)))
    bias.copy_(bias.double() * factors + shifts)
