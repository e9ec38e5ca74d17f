"""The box head of the R-CNNs: class logits and box deltas for every proposal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image
from torchvision.ops.poolers import initLevelMapper

from bucketrank.catalogue import LossSettings
from bucketrank.detectors.candidate_sampling import CandidateSampler
from bucketrank.detectors.criterion import Assigned, HeadRecipe, LossTerms, build_criterion
from bucketrank.detectors.initialisation import initialise_classifier
from bucketrank.detectors.targets import Target
from bucketrank.ops.assignment import assign_max_iou
from bucketrank.ops.box_coder import BoxCoder

STRIDES = (4, 8, 16, 32)  # P2 to P5; proposals are not pooled from P6
RECIPE = HeadRecipe(box_loss="l1", samples=True, softmax=True)


@dataclass(frozen=True)
class BoxHeadStep:
    """The results of one training step of a box head, for the heads that follow. R counts the rows of all images."""

    terms: LossTerms
    assigned: Assigned
    box_deltas: Tensor  # (R, C or 1, 4) without gradient
    proposals: list[Tensor]  # per image, the boxes trained on: proposals and ground-truth boxes
    matches: list[Tensor]  # per image, the object of each box, NEGATIVE or IGNORED
    proposal_rows: list[slice | Tensor]  # per image, the rows of the proposals, without the ground-truth boxes
    pooled: Tensor  # (R, channels, 7, 7) features


class RoIPool(MultiScaleRoIAlign):
    """RoIAlign from the first maps of a pyramid, one per stride; a box of 224 x 224 pixels is pooled at stride 16.

    torchvision derives the strides from the sizes of the first batch and keeps them. If that batch is hardly larger
    than a cell, the strides are wrong for every later batch. Here they are fixed.
    """

    def __init__(self, strides: Sequence[int], *, size: int) -> None:
        super().__init__([str(level) for level in range(len(strides))], output_size=size, sampling_ratio=2)
        self.scales = [1 / stride for stride in strides]
        self.map_levels = initLevelMapper(strides[0].bit_length() - 1, strides[-1].bit_length() - 1)

    def forward(self, features: list[Tensor], boxes: list[Tensor], image_sizes: list[tuple[int, int]]) -> Tensor:
        """Return the features (R, channels, size, size) of the boxes of all images."""
        pooled: Tensor = super().forward(dict(zip(self.featmap_names, features, strict=False)), boxes, image_sizes)
        return pooled


class BoxHead(nn.Module):
    """RoIAlign, two hidden layers, a classifier and a box regressor."""

    def __init__(
        self,
        channels: int,
        *,
        num_classes: int,
        loss: LossSettings,
        hidden: int = 1024,
        class_agnostic: bool = False,
        positive_iou: float = 0.5,
        coder_weights: tuple[float, float, float, float] = (10.0, 10.0, 5.0, 5.0),
        strides: Sequence[int] = STRIDES,
        recipe: HeadRecipe = RECIPE,
    ) -> None:
        super().__init__()
        self.num_classes, self.positive_iou = num_classes, positive_iou
        self.criterion = build_criterion(loss, recipe)
        self.coder = BoxCoder(weights=coder_weights)
        self.sampler = CandidateSampler(512, 0.25)
        self.pool = RoIPool(strides, size=7)
        self.layers = TwoMLPHead(channels * 7 * 7, hidden)
        self.classes = nn.Linear(hidden, num_classes + (1 if self.criterion.softmax else 0))
        self.boxes = nn.Linear(hidden, 4 * (1 if class_agnostic else num_classes))
        for layer in (self.layers.fc6, self.layers.fc7):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        initialise_classifier(self.classes, self.criterion.initial_score)
        nn.init.normal_(self.boxes.weight, std=0.001)
        nn.init.zeros_(self.boxes.bias)

    def forward(
        self, features: list[Tensor], proposals: list[Tensor], image_sizes: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Return the logits (R, C) and box deltas (R, C or 1, 4) of the proposals of all images."""
        return self.predict(self.pool(features, proposals, image_sizes))

    def predict(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and box deltas of proposals with features ``pooled`` (R, channels, 7, 7)."""
        hidden = self.layers(pooled)
        return self.classes(hidden), self.boxes(hidden).reshape(-1, self.boxes.out_features // 4, 4)

    def train_on(
        self,
        features: list[Tensor],
        proposals: list[Tensor],
        ground_truths: list[Target],
        image_sizes: list[tuple[int, int]],
    ) -> BoxHeadStep:
        """Add the ground-truth boxes to the proposals, assign objects to them and compute the loss."""
        candidates, matches = [], []
        proposal_rows: list[slice | Tensor] = []
        for boxes, ground_truth in zip(proposals, ground_truths, strict=True):
            extended = torch.cat([boxes, ground_truth["boxes"].to(boxes.dtype)])
            match = assign_max_iou(
                extended, ground_truth["boxes"], positive=self.positive_iou, negative=self.positive_iou
            )
            proposed: slice | Tensor = slice(len(boxes))
            if self.criterion.samples:
                drawn = self.sampler.rows(match)
                extended, match, proposed = extended[drawn], match[drawn], drawn < len(boxes)
            candidates.append(extended)
            matches.append(match)
            proposal_rows.append(proposed)
        pooled = self.pool(features, candidates, image_sizes)
        logits, box_deltas = self.predict(pooled)
        assigned = Assigned.from_candidates(
            logits, box_deltas, candidates=candidates, matches=matches, ground_truths=ground_truths, coder=self.coder
        )
        return BoxHeadStep(
            terms=self.criterion(assigned),
            assigned=assigned,
            box_deltas=box_deltas.detach(),
            proposals=candidates,
            matches=matches,
            proposal_rows=proposal_rows,
            pooled=pooled,
        )

    def refined(self, box_deltas: Tensor, proposals: list[Tensor], image_sizes: list[tuple[int, int]]) -> list[Tensor]:
        """Return the proposals of each image, moved by the deltas (R, 1, 4) of a class-agnostic head."""
        boxes = self.coder.decode_single(box_deltas[:, 0].detach().float(), torch.cat(proposals))
        split = boxes.split([part.shape[0] for part in proposals])
        return [clip_boxes_to_image(part, size) for part, size in zip(split, image_sizes, strict=True)]
