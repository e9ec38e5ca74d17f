"""The criterion alone knows the losses. To add one: write its class, and name it here."""

from __future__ import annotations

import difflib

from bucketrank.detectors.criterion.assigned import Assigned, assigned, assigned_queries
from bucketrank.detectors.criterion.base import Criterion, HeadRecipe, Terms, confidences, named
from bucketrank.detectors.criterion.ranked import ALRP, DR, AveragePrecision, RankSort
from bucketrank.detectors.criterion.scored import CrossEntropy, Focal
from bucketrank.detectors.settings import LossSettings

LOSSES: dict[str, type[Criterion]] = {
    "rs": RankSort,
    "ap": AveragePrecision,
    "alrp": ALRP,
    "dr": DR,
    "focal": Focal,
    "ce": CrossEntropy,
}


def build_criterion(settings: LossSettings, recipe: HeadRecipe) -> Criterion:
    """The criterion of one head."""
    if settings.name not in LOSSES:
        near = difflib.get_close_matches(settings.name, LOSSES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {settings.name!r}{hint}")
    return LOSSES[settings.name](settings, recipe)


__all__ = [
    "LOSSES",
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
