"""RetinaNet (Lin et al., ICCV 2017): IoU thresholds select the positive anchors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bucketrank.detectors.anchors import Anchors, octave
from bucketrank.detectors.assignment.max_iou import assign_each_image
from bucketrank.detectors.base import Target
from bucketrank.detectors.box_coder import BoxCoder
from bucketrank.detectors.criterion import HeadRecipe
from bucketrank.detectors.dense import DenseDetector, DenseHead, DenseOutput
from bucketrank.detectors.layers import FeaturePyramid
from bucketrank.settings.detector_specs import RetinaNetSettings

EXTRA_LEVELS = {"c5": "convs_on_input", "p5_relu": "convs_on_output_relu"}


class RetinaNet(DenseDetector):
    """RetinaNet. Ranking losses: 2 anchor scales per octave and GIoU; score-based losses: 3 scales and L1 on deltas."""

    recipe = HeadRecipe(box_loss="l1", prior=0.01)

    def __init__(self, num_classes: int, *, settings: RetinaNetSettings, **shared: Any) -> None:
        super().__init__(num_classes, settings=settings, vote=settings.vote, **shared)
        self.positive_iou, self.negative_iou = settings.positive_iou, settings.negative_iou
        criterion = self.criterion
        extra = EXTRA_LEVELS[settings.extra_levels]
        self.neck = FeaturePyramid(self.backbone.channels, settings.channels, extra=extra)
        steps = (2 if criterion.ranking else 3) if settings.scales is None else settings.scales
        ratios = (0.5, 1.0, 2.0)
        self.anchors = Anchors(
            self.neck.strides,
            scales=octave(4, steps),
            ratios=ratios,
            size_divisor=self.size_divisor,
        )
        self.coder = BoxCoder(weights=(1.0, 1.0, 1.0, 1.0) if criterion.box_loss != "giou" else (10.0, 10.0, 5.0, 5.0))
        self.head = DenseHead(
            settings.channels,
            num_classes=num_classes,
            anchors=steps * len(ratios),
            levels=len(self.neck.strides),
            convs=settings.convs,
            normalise=False,
            scale=False,
            prior=criterion.initial_score,
        )

    def assign(self, output: DenseOutput, anchors: Tensor, valid: Tensor, ground_truths: list[Target]) -> list[Tensor]:
        thresholds = {"positive": self.positive_iou, "negative": self.negative_iou, "low_quality": 0.0}
        return assign_each_image(anchors, ground_truths, valid, **thresholds)
