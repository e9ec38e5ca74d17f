"""The last classification layers of a detector, and how their logits become the scores of detections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from bucketrank.data.problems import DataError

Layer = nn.Linear | nn.Conv2d
Link = Literal["sigmoid", "softmax", "other"]


class CannotCalibrateError(DataError):
    """The scores cannot be calibrated; the message says why. The model is unchanged."""


@dataclass(frozen=True)
class ScoreHead:
    """The description of a head that calibration needs.

    ``link`` says how logits become scores: ``"sigmoid"`` of each logit, ``"softmax"`` with a background, or
    ``"other"``, such as a product with a predicted quality; ``reason`` then says why scores cannot be calibrated.

    The outputs of ``layers`` are the logits, or their mean is. A layer has ``columns`` outputs per candidate, the
    classes of an anchor next to each other; the class with the label ``first_label`` comes first. The outputs of
    ``summands`` are added to the logits. A softmax has the column ``background``, and the outputs of ``logits`` (the
    layers themselves by default) end in a dimension of ``columns``. ``thresholds`` are objects and the names of
    their attributes that hold a minimum score.
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
        """The modules whose outputs are the logits, or are averaged to them."""
        return self.logits or self.layers
