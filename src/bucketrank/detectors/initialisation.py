"""Initial weights of classifiers and linear layers."""

from __future__ import annotations

import math

from torch import nn


def initialise_classifier(layer: nn.Linear | nn.Conv2d, score: float) -> None:
    """Set small random weights, and the bias that gives every candidate this score."""
    nn.init.normal_(layer.weight, std=0.01)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, math.log(score / (1 - score)))


def initialise_linear(layer: nn.Linear) -> None:
    """Set Xavier-uniform weights and a bias of 0, as in the layers of a transformer."""
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
