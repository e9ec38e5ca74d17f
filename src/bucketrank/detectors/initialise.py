"""How classifiers start."""

from __future__ import annotations

import math

from torch import nn


def start_classifier(layer: nn.Linear | nn.Conv2d, score: float) -> None:
    """Small random weights, and the bias that gives every candidate this score."""
    nn.init.normal_(layer.weight, std=0.01)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, math.log(score / (1 - score)))
