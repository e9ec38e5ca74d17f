"""The branches that predict the classes and the box of a query."""

from __future__ import annotations

from torch import nn

from bucketrank.detectors.initialisation import initialise_classifier, initialise_linear


def class_branch(width: int, classes: int, *, score: float) -> nn.Linear:
    """Return a layer whose initial scores, the sigmoid of its logits (..., classes), are near ``score``."""
    branch = nn.Linear(width, classes)
    initialise_classifier(branch, score)
    return branch


def box_branch(width: int) -> nn.Sequential:
    """Return a network that predicts changes (..., 4) of the logits of (cx, cy, w, h); initially they are 0."""
    last = nn.Linear(width, 4)
    branch = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)
    for layer in branch:
        if isinstance(layer, nn.Linear):
            initialise_linear(layer)
    nn.init.zeros_(last.weight)
    return branch
