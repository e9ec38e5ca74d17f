"""The region proposal network of the R-CNNs: one foreground class over the anchors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead, concat_box_prediction_layers

from bucketrank.catalogue import LossSettings
from bucketrank.detectors.criterion import HeadRecipe, assigned, build_criterion
from bucketrank.detectors.initialise import start_classifier
from bucketrank.detectors.sampling import subsample
from bucketrank.detectors.targets import Target
from bucketrank.ops.anchors import Anchors
from bucketrank.ops.assignment import assign_max_iou

RECIPE = HeadRecipe(ranking_weight=0.2, box_loss="l1", least_iou=0.7, samples=True)


class RPN(RegionProposalNetwork):
    """torchvision's network and its choice of proposals, with our anchors, assignment and criterion."""

    def __init__(
        self,
        channels: int,
        *,
        loss: LossSettings,
        strides: list[int],
        proposals: int,
        size_divisor: int,
        scales: Sequence[float] = (8.0,),
        border: int | None = None,
        test_proposals: int = 1000,
        candidates: int = 2000,
        test_candidates: int = 1000,
        nms: float = 0.7,
        coder_weights: tuple[float, float, float, float] | None = None,
        recipe: HeadRecipe = RECIPE,
    ) -> None:
        ratios = (0.5, 1.0, 2.0)
        anchors = Anchors(strides, scales=scales, ratios=ratios, size_divisor=size_divisor, border=border)
        super().__init__(
            anchors,
            RPNHead(channels, len(scales) * len(ratios)),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": candidates, "testing": test_candidates},
            post_nms_top_n={"training": proposals, "testing": test_proposals},
            nms_thresh=nms,
        )
        self.criterion = build_criterion(loss, recipe)
        start_classifier(self.head.cls_logits, self.criterion.initial_score)
        # GIoU compares decoded boxes, L1 the codes: as published, each with its own coding.
        usual = (10.0, 10.0, 5.0, 5.0) if self.criterion.box_loss == "giou" else (1.0, 1.0, 1.0, 1.0)
        self.box_coder = BoxCoder(weights=coder_weights or usual)

    def forward(
        self, images: ImageList, features: list[Tensor], truths: list[Target] | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The proposals of each image and, with ``truths``, the terms of this head."""
        objectness, codes = self.head(features)
        per_level = [level[0].numel() for level in objectness]
        logits, codes = concat_box_prediction_layers(objectness, codes)
        anchors = torch.cat(self.anchor_generator(features))
        count = len(images.image_sizes)
        decoded = self.box_coder.decode_single(codes.detach().float(), anchors.repeat(count, 1))
        proposals, _ = self.filter_proposals(
            decoded.reshape(count, -1, 4), logits.detach().float(), images.image_sizes, per_level
        )
        if truths is None:
            return proposals, {}
        valid = self.anchor_generator.valid(anchors, images.image_sizes)
        matches = [
            assign_max_iou(anchors, truth["boxes"], positive=0.7, negative=0.3, low_quality=0.3, valid=here)
            for truth, here in zip(truths, valid, strict=True)
        ]
        if self.criterion.samples:
            matches = [subsample(match, self.fg_bg_sampler) for match in matches]
        found = assigned(
            logits,
            codes,
            candidates=[anchors] * count,
            matches=matches,
            truths=[truth | {"labels": torch.zeros_like(truth["labels"])} for truth in truths],
            coder=self.box_coder,
        )
        return proposals, self.criterion(found)
