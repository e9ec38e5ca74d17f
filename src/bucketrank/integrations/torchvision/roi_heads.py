"""The RoI heads: every proposal and every object ranked for each class, none sampled."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads

from bucketrank.integrations.ranking import Ranking
from bucketrank.integrations.torchvision.coding import relative_boxes
from bucketrank.integrations.torchvision.odds import log_odds
from bucketrank.integrations.torchvision.terms import head_terms, named


class RankingRoIHeads(RoIHeads):
    """``RoIHeads`` whose box classifier is ranked by its log-odds.

    The classifier stays a softmax with background: the sigmoid of a class's log-odds *is* its softmax probability,
    so ranking the one ranks the other, and the parent's post-processing is already the matching one.
    """

    ranking: Ranking
    drawn: tuple[Tensor, Tensor]  # of the current batch: labels and regression targets of all proposals

    def subsample(self, labels: list[Tensor]) -> list[Tensor]:
        return [torch.where(image >= 0)[0] for image in labels]

    def select_training_samples(
        self, proposals: list[Tensor], targets: list[dict[str, Tensor]] | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        proposals, matches, labels, codes = super().select_training_samples(proposals, targets)
        self.drawn = torch.cat(labels), torch.cat(codes)
        # What is returned decides which proposals reach the mask and keypoint heads: as many as before, not all.
        most = int(self.fg_bg_sampler.batch_size_per_image * self.fg_bg_sampler.positive_fraction)
        return proposals, matches, [at_most(most, image) for image in labels], codes

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        if not self.training:
            result, losses = super().forward(features, proposals, image_shapes, targets)
            return result, losses

        # The parent calls its box loss as a global function. Leave it be, and rank what the predictor gave it.
        predictions: list[tuple[Tensor, Tensor]] = []

        def keep(_module: nn.Module, _inputs: object, outputs: tuple[Tensor, Tensor]) -> None:
            predictions.append(outputs)

        handle = self.box_predictor.register_forward_hook(keep)
        try:
            result, losses = super().forward(features, proposals, image_shapes, targets)
            ranked = self.box_losses(*predictions[0], *self.drawn)
        finally:
            handle.remove()
            self.__dict__.pop("drawn", None)
        rest = {name: loss for name, loss in losses.items() if name not in {"loss_classifier", "loss_box_reg"}}
        return result, ranked | rest

    def box_losses(self, logits: Tensor, codes: Tensor, labels: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """Rank R proposals: ``logits`` (R, 1 + C), ``codes`` (R, 4 + 4C), ``wanted`` (R, 4); label 0 is background."""
        positives = torch.where(labels > 0)[0]
        codes = codes.reshape(len(codes), -1, 4)[positives, labels[positives]]  # the box of the object's own class
        terms = head_terms(
            self.ranking,
            log_odds(logits)[:, 1:],
            labels - 1,  # background becomes -1
            boxes=relative_boxes(self.box_coder, codes),
            objects=relative_boxes(self.box_coder, wanted[positives]),
        )
        return named(terms, "loss_classifier", "loss_box_reg")


def at_most(most: int, labels: Tensor) -> Tensor:
    """The labels with all but a random ``most`` of the positives turned to background."""
    positives = torch.where(labels > 0)[0]
    dropped = positives[torch.randperm(len(positives), device=labels.device)[most:]]
    return labels.index_fill(0, dropped, 0)
