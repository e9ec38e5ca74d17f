"""Criteria: the only part of a detector head that depends on the loss."""

from __future__ import annotations

from bucketrank.detectors.criterion.base import Assigned, Criterion, HeadRecipe, LossTerms, named
from bucketrank.settings import LossSettings, loss_spec


def build_criterion(settings: LossSettings, recipe: HeadRecipe) -> Criterion:
    """Build the criterion of one head for the loss named in the settings."""
    criterion: Criterion = loss_spec(settings.name).load()(settings, recipe)
    return criterion


__all__ = [
    "Assigned",
    "Criterion",
    "HeadRecipe",
    "LossTerms",
    "build_criterion",
    "named",
]
