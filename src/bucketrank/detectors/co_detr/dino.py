"""Co-DINO: Co-DETR with DINO's decoder and contrastive denoising, and soft-NMS of its detections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from bucketrank.detectors.base import Target
from bucketrank.detectors.co_detr.decoder import Decoded
from bucketrank.detectors.co_detr.denoising import DenoisingQueries
from bucketrank.detectors.co_detr.model import RECIPE, CollaborativeDETR, QueryLayer, image_scales
from bucketrank.detectors.co_detr.transformer import Geometry
from bucketrank.detectors.criterion import Assigned
from bucketrank.settings import LossSettings, RankingSettings
from bucketrank.settings.detector_specs import CoDINOSettings
from bucketrank.settings.loss_specs import FocalSettings

# The published weights: classification 1, L1 5 and GIoU 2. A ranking loss has Co-DETR's.
SCORED_RECIPE = replace(RECIPE, scored_weight=1.0, scored_box_weight=2.0, l1_weight=5.0)
MIN_SCORE = 1e-3  # soft-NMS removes detections below it


class CoDINO(CollaborativeDETR):
    """Co-DINO, published with Quality Focal Loss (``loss="qfl"``).

    Unlike in Co-DETR, the proposals have all classes, and only the selected ones are trained; the positions of the
    queries follow their boxes from layer to layer; and noisy copies of the objects are additional queries. A
    score-based loss trains the queries; the auxiliary heads then have their published losses, focal loss and
    cross-entropy. A ranking loss trains all of them.
    """

    dino = True

    def __init__(self, num_classes: int, *, loss: LossSettings, settings: CoDINOSettings, **shared: Any) -> None:
        ranking = isinstance(loss, RankingSettings)
        super().__init__(
            num_classes,
            # As published, all query boxes have the same weight.
            loss=replace(loss, box_confidence=False) if loss.box_confidence is None else loss,
            settings=settings,
            recipe=RECIPE if ranking else SCORED_RECIPE,
            auxiliary_loss=loss if ranking else as_focal(loss),
            proposal_logits=num_classes,
            denoising=settings.denoising > 0,
            **shared,
        )
        self.soft_nms = settings.soft_nms
        self.denoising = None
        if settings.denoising:
            self.denoising = DenoisingQueries(
                settings.channels,
                num_classes,
                limit=settings.denoising,
                label_noise=settings.label_noise,
                box_noise=settings.box_noise,
            )

    def assigned_queries(
        self, images: ImageList, geometry: Geometry, memory: Tensor, ground_truths: list[Target]
    ) -> dict[str, list[Assigned]]:
        proposals = self.proposer(memory, geometry)
        chosen = proposals.at(proposals.top(self.selected.count))
        queries = self.selected(chosen.boxes.detach())
        scales = image_scales(images.image_sizes, memory.device)
        noisy = None if self.denoising is None else self.denoising(ground_truths, scales)
        decoded = self.decoder(queries if noisy is None else noisy.before(queries), memory, geometry)
        copies = 0 if noisy is None else noisy.boxes.shape[1]
        layers = [Decoded(each.logits[:, copies:], each.boxes[:, copies:]) for each in decoded]
        encoder, *decoder = self.match_queries(
            [QueryLayer(each, ground_truths) for each in (chosen, *layers)], images.image_sizes
        )
        assigned = {"encoder": [encoder], "decoder": decoder}
        if noisy is not None:
            assigned["denoising"] = Assigned.from_queries(
                [(each.logits[:, :copies], each.boxes[:, :copies]) for each in decoded],
                matches=noisy.matches,
                ground_truths=ground_truths,
                scales=scales,
            )
        return assigned

    def top_detections(self, last: Decoded, image_sizes: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
        results = super().top_detections(last, image_sizes)
        return results if self.soft_nms is None else [soften(result, iou=self.soft_nms) for result in results]


def as_focal(loss: LossSettings) -> LossSettings:
    """Return focal loss for the auxiliary heads, with the shared settings of another score-based loss."""
    return loss if isinstance(loss, FocalSettings) else FocalSettings(name="focal", **loss.shared)


def soften(detections: dict[str, Tensor], *, iou: float) -> dict[str, Tensor]:
    """Lower the scores of overlapping detections of a class: linear soft-NMS (Bodla et al., ICCV 2017).

    From the highest score on, each detection multiplies the remaining scores of its class by ``1 - IoU`` where the IoU
    is at least ``iou``. Detections below ``MIN_SCORE`` are removed. Takes O(n^2) time; there is no device sync before
    the removal, and no branch, so that it can be exported.
    """
    boxes, scores, labels = (detections[name] for name in ("boxes", "scores", "labels"))
    overlaps = box_iou(boxes, boxes)
    suppressed = (overlaps >= iou) & (labels[:, None] == labels)
    factors = torch.where(suppressed, 1 - overlaps, 1.0)
    remaining, order, softened = scores, [], []
    for _ in range(len(scores)):
        score, row = remaining.max(0, keepdim=True)
        order.append(row)
        softened.append(score)
        remaining = (remaining * factors[row][0]).index_fill(0, row, -1.0)
    if not order:
        return detections
    rows, values = torch.cat(order), torch.cat(softened)
    kept = values >= MIN_SCORE
    return {"boxes": boxes[rows[kept]], "scores": values[kept], "labels": labels[rows[kept]]}
