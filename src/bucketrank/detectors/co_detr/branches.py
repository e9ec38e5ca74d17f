"""What is read off a query: its classes and its box."""

from __future__ import annotations

from torch import nn

from bucketrank.detectors.co_detr.transformer import start_linear
from bucketrank.detectors.initialise import start_classifier


def class_branch(width: int, classes: int, *, score: float) -> nn.Linear:
    """Logits (..., classes), each starting near the one of ``score``."""
    branch = nn.Linear(width, classes)
    start_classifier(branch, score)
    return branch


def box_branch(width: int) -> nn.Sequential:
    """How the logits of a box's centre and size are to move; at the start, not at all."""
    last = nn.Linear(width, 4)
    branch = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)
    for layer in branch:
        if isinstance(layer, nn.Linear):
            start_linear(layer)
    nn.init.zeros_(last.weight)
    return branch
