"""The box head of the R-CNNs: classes and a box for every proposal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, BoxCoder
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image
from torchvision.ops.poolers import initLevelMapper

from bucketrank.catalogue import LossSettings
from bucketrank.detectors.criterion import Assigned, HeadRecipe, Terms, assigned, build_criterion
from bucketrank.detectors.initialise import start_classifier
from bucketrank.detectors.sampling import subsample
from bucketrank.detectors.targets import Target
from bucketrank.ops.assignment import IGNORED, assign_max_iou

STRIDES = (4, 8, 16, 32)  # P2 to P5: proposals are not pooled from P6
RECIPE = HeadRecipe(box_loss="l1", samples=True, softmax=True)


@dataclass(frozen=True)
class Trained:
    """What one training step of a box head leaves to those after it."""

    terms: Terms
    found: Assigned
    codes: Tensor  # (R, C or 1, 4)
    proposals: list[Tensor]  # those trained on, for each image, its objects among them
    matches: list[Tensor]  # the object of each
    given: list[Tensor]  # whether each was a proposal, and not an object added
    pooled: Tensor  # (R, channels, 7, 7) of each


class RoIPool(MultiScaleRoIAlign):
    """RoIAlign from the first maps of a pyramid, one for each of ``strides``; a box of 224 pixels belongs to stride 16.

    torchvision reads the strides off the first batch, from a map's size over the image's, and keeps them: an image not
    much larger than a cell would set them wrong for good.
    """

    def __init__(self, strides: Sequence[int], *, size: int) -> None:
        super().__init__([str(level) for level in range(len(strides))], output_size=size, sampling_ratio=2)
        self.scales = [1 / stride for stride in strides]
        self.map_levels = initLevelMapper(strides[0].bit_length() - 1, strides[-1].bit_length() - 1)

    def forward(self, features: list[Tensor], boxes: list[Tensor], image_sizes: list[tuple[int, int]]) -> Tensor:
        """(R, channels, size, size) of the boxes of all images."""
        pooled: Tensor = super().forward(dict(zip(self.featmap_names, features, strict=False)), boxes, image_sizes)
        return pooled


class BoxHead(nn.Module):
    """RoIAlign, two hidden layers, a classifier and a regressor of boxes."""

    def __init__(
        self,
        channels: int,
        *,
        num_classes: int,
        loss: LossSettings,
        hidden: int = 1024,
        class_agnostic: bool = False,
        positive_iou: float = 0.5,
        low_quality: float | None = None,
        coder_weights: tuple[float, float, float, float] = (10.0, 10.0, 5.0, 5.0),
        strides: Sequence[int] = STRIDES,
        recipe: HeadRecipe = RECIPE,
    ) -> None:
        super().__init__()
        self.num_classes, self.positive_iou, self.low_quality = num_classes, positive_iou, low_quality
        self.criterion = build_criterion(loss, recipe)
        self.coder = BoxCoder(weights=coder_weights)
        self.sampler = BalancedPositiveNegativeSampler(512, 0.25)
        self.pool = RoIPool(strides, size=7)
        self.layers = TwoMLPHead(channels * 7 * 7, hidden)
        self.classes = nn.Linear(hidden, num_classes + (1 if self.criterion.softmax else 0))
        self.boxes = nn.Linear(hidden, 4 * (1 if class_agnostic else num_classes))
        for layer in (self.layers.fc6, self.layers.fc7):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        start_classifier(self.classes, self.criterion.initial_score)
        nn.init.normal_(self.boxes.weight, std=0.001)
        nn.init.zeros_(self.boxes.bias)

    def forward(
        self, features: list[Tensor], proposals: list[Tensor], image_sizes: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Logits (R, C) and codes (R, C or 1, 4) of the proposals of all images."""
        return self.predict(self.pool(features, proposals, image_sizes))

    def predict(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """The same of proposals already pooled (R, channels, 7, 7)."""
        hidden = self.layers(pooled)
        return self.classes(hidden), self.boxes(hidden).reshape(-1, self.boxes.out_features // 4, 4)

    def train_on(
        self,
        features: list[Tensor],
        proposals: list[Tensor],
        truths: list[Target],
        image_sizes: list[tuple[int, int]],
    ) -> Trained:
        """Assign the proposals, with the objects themselves among them, and compare."""
        chosen, matches, given = [], [], []
        for boxes, truth in zip(proposals, truths, strict=True):
            together = torch.cat([boxes, truth["boxes"].to(boxes.dtype)])
            match = assign_max_iou(
                together,
                truth["boxes"],
                positive=self.positive_iou,
                negative=self.positive_iou,
                low_quality=self.low_quality,
            )
            own = torch.arange(len(together), device=match.device) < len(boxes)
            if self.criterion.samples:
                match = subsample(match, self.sampler)
                drawn = match != IGNORED
                together, match, own = together[drawn], match[drawn], own[drawn]
            chosen.append(together)
            matches.append(match)
            given.append(own)
        pooled = self.pool(features, chosen, image_sizes)
        logits, codes = self.predict(pooled)
        found = assigned(logits, codes, candidates=chosen, matches=matches, truths=truths, coder=self.coder)
        return Trained(self.criterion(found), found, codes.detach(), chosen, matches, given, pooled)

    def refined(self, codes: Tensor, proposals: list[Tensor], image_sizes: list[tuple[int, int]]) -> list[Tensor]:
        """The boxes of all images after the codes (R, 1, 4) of a class-agnostic head."""
        boxes = self.coder.decode_single(codes[:, 0].detach().float(), torch.cat(proposals))
        split = boxes.split([part.shape[0] for part in proposals])
        return [clip_boxes_to_image(part, size) for part, size in zip(split, image_sizes, strict=True)]
