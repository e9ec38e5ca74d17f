"""What the adapters share: a ranking loss with its settings, in the form in which detectors report losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bucketrank.losses import ap_loss, rank_sort_loss
from bucketrank.losses.functional import check_settings

DELTAS = {"rs": 0.5, "ap": 1.0}
# The label of a positive whose box does not overlap at all: above 0, or it would count as a negative.
SMALLEST_LABEL = 1e-6


@dataclass(frozen=True)
class Ranking:
    """A ranking loss and its settings; ``delta`` is the loss's own default unless given."""

    loss: str = "rs"
    method: str = "exact"
    delta: float | None = None

    def __post_init__(self) -> None:
        if self.loss not in DELTAS:
            raise ValueError(f"use_ranking_loss: expected loss to be one of {', '.join(DELTAS)}, got {self.loss!r}")
        check_settings("use_ranking_loss", self.width, self.method)

    @property
    def width(self) -> float:
        """The delta in use."""
        return DELTAS[self.loss] if self.delta is None else self.delta

    def terms(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The terms by the names under which they are logged: ``rank``, and for RS ``sort``."""
        if self.loss == "ap":
            return {"rank": ap_loss(logits, targets, delta=self.width, method=self.method)}
        ranking, sorting = rank_sort_loss(logits, targets, delta=self.width, method=self.method)
        return {"rank": ranking, "sort": sorting}

    def labels(self, overlaps: Tensor) -> Tensor:
        """The targets of positives whose boxes overlap theirs this much: the IoU for RS, 1 for AP; no gradient."""
        overlaps = overlaps.detach()
        return torch.ones_like(overlaps) if self.loss == "ap" else overlaps.clamp(min=SMALLEST_LABEL)
