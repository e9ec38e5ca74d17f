"""The base of the detectors that hold a model of another library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from bucketrank.catalogue import LossSettings, RankingSettings
from bucketrank.catalogue.loss_specs import APSettings
from bucketrank.detectors import Detector
from bucketrank.detectors.targets import Target, check_images, check_targets


class LibraryDetector(Detector):
    """A model of another library, ``model``, with the interface and the checks of our detectors.

    A subclass sets ``model`` and ``transform`` and adds :meth:`model_losses` and :meth:`model_detections`.
    """

    model: nn.Module

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Target] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        check_images(images)
        if not self.training:
            return self.model_detections(list(images))
        check_targets(images, targets, self.num_classes, masks=self.masks)
        return self.model_losses(list(images), list(targets or ()))

    def model_losses(self, images: list[Tensor], targets: list[Target]) -> dict[str, Tensor]:
        """Return the loss terms by name; labels count from 1."""
        raise NotImplementedError

    def model_detections(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        """Return the detections of each image, in its pixels; labels count from 1."""
        raise NotImplementedError


def ranking_arguments(loss: LossSettings) -> dict[str, Any] | None:
    """Return the arguments of ``use_ranking_loss``, or None for the model's own loss.

    ValueError for settings that the adapters do not have.
    """
    ranking = isinstance(loss, RankingSettings)
    loss.require("ranking_scope", "batch for a model of another library", holds=loss.ranking_scope == "batch")
    for name in ("box_balance", "box_confidence"):
        loss.require(name, "null for a model of another library", holds=getattr(loss, name) is None)
    loss.require("smooth_l1_beta", "1 for a model of another library", holds=loss.smooth_l1_beta == 1)
    if ranking:
        loss.require("box_loss", "giou or null for a model of another library", holds=loss.box_loss in (None, "giou"))
    else:
        for name in ("box_loss", "box_weight"):
            loss.require(name, "null with the model's own loss", holds=getattr(loss, name) is None)
    if isinstance(loss, APSettings):
        loss.require("interpolate", "false for a model of another library", holds=not loss.interpolate)
    if not isinstance(loss, RankingSettings):
        return None
    return {"loss": loss.name, "method": loss.method, "delta": loss.delta, "box_weight": loss.box_weight}
