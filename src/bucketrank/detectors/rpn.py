"""The region proposal network (RPN) of the R-CNNs: it scores anchors for one class, object or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead, concat_box_prediction_layers

from bucketrank.catalogue import LossSettings
from bucketrank.detectors.candidate_sampling import CandidateSampler
from bucketrank.detectors.criterion import Assigned, HeadRecipe, build_criterion
from bucketrank.detectors.initialisation import initialise_classifier
from bucketrank.detectors.targets import Target
from bucketrank.ops.anchors import Anchors
from bucketrank.ops.assignment import assign_max_iou
from bucketrank.ops.box_coder import BoxCoder

RECIPE = HeadRecipe(ranking_weight=0.2, box_loss="l1", least_iou=0.7, samples=True)
TEST_CANDIDATES = 1000  # highest scores per level that enter NMS when testing
NMS = 0.7  # IoU above which NMS removes the lower score
SAMPLED, SAMPLED_POSITIVES = 256, 0.5  # anchors per image that cross-entropy trains on, and how many may be positive


class RPN(RegionProposalNetwork):
    """torchvision's network and selection of proposals, with the anchors, assignment and criterion of this package."""

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
            batch_size_per_image=SAMPLED,
            positive_fraction=SAMPLED_POSITIVES,
            pre_nms_top_n={"training": candidates, "testing": TEST_CANDIDATES},
            post_nms_top_n={"training": proposals, "testing": test_proposals},
            nms_thresh=NMS,
        )
        self.sampler = CandidateSampler(SAMPLED, SAMPLED_POSITIVES)
        self.criterion = build_criterion(loss, recipe)
        initialise_classifier(self.head.cls_logits, self.criterion.initial_score)
        # As published: GIoU compares decoded boxes and L1 compares deltas, each with its own weights of the deltas.
        published = (10.0, 10.0, 5.0, 5.0) if self.criterion.box_loss == "giou" else (1.0, 1.0, 1.0, 1.0)
        self.box_coder = BoxCoder(weights=coder_weights or published)

    def forward(
        self, images: ImageList, features: list[Tensor], ground_truths: list[Target] | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the proposals of each image and, with ``ground_truths``, the loss terms of this head."""
        objectness, level_deltas = self.head(features)
        per_level = [level[0].numel() for level in objectness]
        logits, box_deltas = concat_box_prediction_layers(objectness, level_deltas)
        anchors = torch.cat(self.anchor_generator(features))
        count = len(images.image_sizes)
        decoded = self.box_coder.decode_single(box_deltas.detach().float(), anchors.repeat(count, 1))
        proposals, _ = self.filter_proposals(
            decoded.reshape(count, -1, 4), logits.detach().float(), images.image_sizes, per_level
        )
        if ground_truths is None:
            return proposals, {}
        valid = self.anchor_generator.valid(anchors, images.image_sizes)
        matches = [
            assign_max_iou(
                anchors, ground_truth["boxes"], positive=0.7, negative=0.3, low_quality=0.3, valid=valid_here
            )
            for ground_truth, valid_here in zip(ground_truths, valid, strict=True)
        ]
        if self.criterion.samples:
            matches = [self.sampler.subsample(match) for match in matches]
        one_class = [each | {"labels": torch.zeros_like(each["labels"])} for each in ground_truths]
        assigned = Assigned.from_candidates(
            logits,
            box_deltas,
            candidates=[anchors] * count,
            matches=matches,
            ground_truths=one_class,
            coder=self.box_coder,
        )
        return proposals, self.criterion(assigned)
