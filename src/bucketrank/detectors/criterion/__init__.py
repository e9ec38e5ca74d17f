"""The criterion of a head: the only part of a detector that knows the losses."""

from __future__ import annotations

from bucketrank.catalogue import LossSettings, loss_spec
from bucketrank.detectors.criterion.assigned import Assigned, assigned, assigned_queries
from bucketrank.detectors.criterion.base import Criterion, HeadRecipe, Terms, confidences, named


def build_criterion(settings: LossSettings, recipe: HeadRecipe) -> Criterion:
    """Build the criterion of one head from the loss that the settings name."""
    criterion: Criterion = loss_spec(settings.name).load()(settings, recipe)
    return criterion


__all__ = [
    "Assigned",
    "Criterion",
    "HeadRecipe",
    "Terms",
    "assigned",
    "assigned_queries",
    "build_criterion",
    "confidences",
    "named",
]
