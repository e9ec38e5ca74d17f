"""A detector whose images are lists of candidates, so that scores, boxes and errors are chosen by the test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bucketrank.detectors.dense import class_nms, top_scores
from bucketrank.evaluation.calibration import ScoreHead

CLASSES = 3
SIDE = 1000.0


class ListedDetector(nn.Module):
    """An image is (n, 4 + CLASSES): the boxes and the features of n candidates; a linear layer scores them.

    Like our detectors it cuts at ``score_threshold``, applies NMS within each class and keeps the best ``limit``.
    """

    stored_threshold = 0.0

    def __init__(self, *, softmax: bool = False, limit: int = 100) -> None:
        super().__init__()
        self.softmax, self.limit, self.score_threshold = softmax, limit, 0.0
        self.classes = nn.Linear(CLASSES, CLASSES + softmax)
        with torch.no_grad():
            self.classes.weight.copy_(0.4 * torch.eye(CLASSES + softmax, CLASSES))
            self.classes.bias.fill_(0.0 if softmax else -4.0)

    def score_head(self) -> ScoreHead:
        if self.softmax:
            return ScoreHead("softmax", layers=(self.classes,), columns=CLASSES + 1, background=CLASSES)
        return ScoreHead("sigmoid", layers=(self.classes,), columns=CLASSES, thresholds=((self, "score_threshold"),))

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        results = []
        for image in images:
            logits = self.classes(image[:, 4:].to(self.classes.weight.dtype)).float()
            scores = logits.softmax(1)[:, :-1] if self.softmax else logits.sigmoid()
            values, rows, labels = top_scores(scores, limit=1000, threshold=self.score_threshold)
            results.append(class_nms(image[rows, :4], values, labels + 1, iou=0.5, limit=self.limit))
        return results


def listed_images(count: int, *, seed: int = 0, objects: int = 6) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return images with objects of all classes; the features of a candidate say, with noise, what lies under it."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    items = []
    for _ in range(count):
        corners = uniform(objects, 2) * (SIDE - 100)
        boxes = torch.cat([corners, corners + 40 + 60 * uniform(objects, 2)], 1)
        labels = torch.randint(1, CLASSES + 1, (objects,), generator=generator)
        near = boxes.repeat(3, 1) + 24 * (uniform(3 * objects, 4) - 0.5)
        corners = uniform(12, 2) * (SIDE - 100)
        anywhere = torch.cat([corners, corners + 40 + 60 * uniform(12, 2)], 1)
        features = torch.randn(3 * objects + 12, CLASSES, generator=generator)
        features[torch.arange(3 * objects), labels.repeat(3) - 1] += 3
        target: dict[str, Any] = {"boxes": boxes, "labels": labels}
        items.append((torch.cat([torch.cat([near, anywhere]), features], 1), target))
    return items
