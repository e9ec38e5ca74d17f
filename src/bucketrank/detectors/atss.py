"""ATSS (Zhang et al., CVPR 2020): an adaptive IoU threshold per object selects the positive anchors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bucketrank.boxes import centerness, centres
from bucketrank.detectors.anchors import Anchors, octave
from bucketrank.detectors.assignment import assign_atss
from bucketrank.detectors.base import Target
from bucketrank.detectors.box_coder import BoxCoder
from bucketrank.detectors.criterion import HeadRecipe
from bucketrank.detectors.dense import DenseDetector, DenseHead, DenseOutput
from bucketrank.detectors.layers import FeaturePyramid
from bucketrank.settings.detector_specs import ATSSSettings


def anchor_centerness(anchors: Tensor, _: Tensor, objects: Tensor) -> Tensor:
    """Compute the quality branch targets (P,): the centerness of each anchor in its object."""
    return centerness(centres(anchors), objects)


class ATSS(DenseDetector):
    """ATSS. Ranking losses use 3 anchors per location and no centerness, score-based losses 1 anchor and centerness."""

    recipe = HeadRecipe(ranking_box_weight=2.0, scored_box_weight=2.0, prior=0.01, average_counts=True)
    votes = False  # whether score voting is on by default

    def __init__(self, num_classes: int, *, settings: ATSSSettings, **shared: Any) -> None:
        vote = self.votes if settings.vote is None else settings.vote
        super().__init__(num_classes, settings=settings, vote=vote, **shared)
        self.topk = settings.topk
        criterion = self.criterion
        self.neck = FeaturePyramid(self.backbone.channels, settings.channels, extra="convs_on_output")
        quality_branch = criterion.quality_branch if settings.quality_branch is None else settings.quality_branch
        if quality_branch and not criterion.quality_branch:
            raise ValueError(
                "detector.quality_branch: expected null or false with a loss that does not train such a branch, "
                f"{shared['loss'].name}, got true; leave it out"
            )
        count = (3 if criterion.ranking else 1) if settings.anchors is None else settings.anchors
        scales = (8.0,) if count == 1 else octave(4, count)
        self.anchors = Anchors(self.neck.strides, scales=scales, ratios=(1.0,), size_divisor=self.size_divisor)
        self.coder = BoxCoder(weights=(10.0, 10.0, 5.0, 5.0))
        self.head = DenseHead(
            settings.channels,
            num_classes=num_classes,
            anchors=count,
            levels=len(self.neck.strides),
            convs=settings.convs,
            quality=quality_branch,
            prior=criterion.initial_score,
        )

    def assign(self, output: DenseOutput, anchors: Tensor, valid: Tensor, ground_truths: list[Target]) -> list[Tensor]:
        objects = [ground_truth["boxes"] for ground_truth in ground_truths]
        return list(assign_atss(anchors, objects, per_level=output.per_level, topk=self.topk, valid=valid))

    def quality(self, anchors: Tensor, boxes: Tensor, objects: Tensor) -> Tensor:
        return anchor_centerness(anchors, boxes, objects)

    def scores(self, output: DenseOutput) -> Tensor:
        scores = super().scores(output)
        return scores if output.quality is None else scores * output.quality.float().sigmoid()[..., None]
