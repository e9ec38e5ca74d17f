"""The RoI heads: one ranking over all proposals and objects of the batch and over all classes, without sampling."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads

from bucketrank.integrations.ranking_loss import RankingLoss
from bucketrank.integrations.torchvision.head_terms import head_terms, named
from bucketrank.integrations.torchvision.labels import check_label_shapes, check_labels
from bucketrank.integrations.torchvision.log_odds import log_odds
from bucketrank.integrations.torchvision.relative_boxes import relative_boxes


class RankingRoIHeads(RoIHeads):
    """``RoIHeads`` with a ranking loss over the log-odds of its classifier.

    The classifier stays a softmax with background. The sigmoid of a class's log-odds equals its softmax probability,
    so ranking the log-odds ranks the scores of inference, and the parent's post-processing needs no change.
    """

    ranking_loss: RankingLoss
    proposal_targets: tuple[Tensor, Tensor]  # labels (R,) and target deltas (R, 4) of the current batch's proposals

    def subsample(self, labels: list[Tensor]) -> list[Tensor]:
        return [torch.where(image_labels >= 0)[0] for image_labels in labels]

    def select_training_samples(
        self, proposals: list[Tensor], targets: list[dict[str, Tensor]] | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        proposals, matches, labels, deltas = super().select_training_samples(proposals, targets)
        self.proposal_targets = torch.cat(labels), torch.cat(deltas)
        # The returned labels choose the proposals for the mask and keypoint heads: keep the parent's limit for them.
        limit = int(self.fg_bg_sampler.batch_size_per_image * self.fg_bg_sampler.positive_fraction)
        return proposals, matches, [limit_positives(image_labels, limit) for image_labels in labels], deltas

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

        check_label_shapes(targets or [])  # before the parent uses the labels
        # The parent's box loss is a module-level function, which cannot be overridden. Let the parent compute it,
        # discard it, and rank the outputs of the predictor instead.
        predictions: list[tuple[Tensor, Tensor]] = []

        def keep_outputs(_module: nn.Module, _inputs: object, outputs: tuple[Tensor, Tensor]) -> None:
            # Here, because the parent's loss fails for a label beyond the last class and treats label 0 as background.
            check_labels(targets or [], first=1, last=outputs[0].shape[1] - 1)
            predictions.append(outputs)

        hook = self.box_predictor.register_forward_hook(keep_outputs)
        try:
            result, losses = super().forward(features, proposals, image_shapes, targets)
            box_losses = self.box_losses(*predictions[0], *self.proposal_targets)
        finally:
            hook.remove()
            self.__dict__.pop("proposal_targets", None)
        others = {name: loss for name, loss in losses.items() if name not in {"loss_classifier", "loss_box_reg"}}
        return result, box_losses | others

    def box_losses(self, logits: Tensor, deltas: Tensor, labels: Tensor, target_deltas: Tensor) -> dict[str, Tensor]:
        """Return the losses of R proposals.

        ``logits`` is (R, 1 + C), ``deltas`` (R, 4 + 4C), ``labels`` (R,) with 0 for background, ``target_deltas``
        (R, 4).
        """
        positives = torch.where(labels > 0)[0]
        deltas = deltas.reshape(len(deltas), -1, 4)[positives, labels[positives]]  # the deltas of the object's class
        terms = head_terms(
            self.ranking_loss,
            log_odds(logits)[:, 1:],
            labels - 1,  # background becomes -1
            boxes=relative_boxes(self.box_coder, deltas),
            objects=relative_boxes(self.box_coder, target_deltas[positives]),
        )
        return named(terms, "loss_classifier", "loss_box_reg")


def limit_positives(labels: Tensor, limit: int) -> Tensor:
    """Return ``labels`` with at most ``limit`` positives, chosen at random; the other positives become background."""
    positives = torch.where(labels > 0)[0]
    dropped = positives[torch.randperm(len(positives), device=labels.device)[limit:]]
    return labels.index_fill(0, dropped, 0)
