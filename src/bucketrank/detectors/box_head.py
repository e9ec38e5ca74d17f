"""The box head of the R-CNNs: classes and a box for every proposal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, BoxCoder
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image

from bucketrank.detectors.criterion import Assigned, HeadRecipe, Terms, assigned, build_criterion
from bucketrank.detectors.initialise import start_classifier
from bucketrank.detectors.sampling import subsample
from bucketrank.detectors.settings import LossSettings
from bucketrank.detectors.targets import Target
from bucketrank.ops.assignment import IGNORED, assign_max_iou

LEVELS = 4  # P2 to P5: proposals are not pooled from P6
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
        recipe: HeadRecipe = RECIPE,
    ) -> None:
        super().__init__()
        self.num_classes, self.positive_iou, self.low_quality = num_classes, positive_iou, low_quality
        self.criterion = build_criterion(loss, recipe)
        self.coder = BoxCoder(weights=coder_weights)
        self.sampler = BalancedPositiveNegativeSampler(512, 0.25)
        self.pool = MultiScaleRoIAlign([str(level) for level in range(LEVELS)], output_size=7, sampling_ratio=2)
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
        levels = {str(level): feature for level, feature in enumerate(features[:LEVELS])}
        hidden = self.layers(self.pool(levels, proposals, image_sizes))
        return self.classes(hidden), self.boxes(hidden).reshape(len(hidden), -1, 4)

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
        logits, codes = self(features, chosen, image_sizes)
        found = assigned(logits, codes, candidates=chosen, matches=matches, truths=truths, coder=self.coder)
        return Trained(self.criterion(found), found, codes.detach(), chosen, matches, given)

    def refined(self, codes: Tensor, proposals: list[Tensor], image_sizes: list[tuple[int, int]]) -> list[Tensor]:
        """The boxes of all images after the codes (R, 1, 4) of a class-agnostic head."""
        boxes = self.coder.decode_single(codes[:, 0].detach().float(), torch.cat(proposals))
        split = boxes.split([len(part) for part in proposals])
        return [clip_boxes_to_image(part, size) for part, size in zip(split, image_sizes, strict=True)]
