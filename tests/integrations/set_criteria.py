"""Small criteria on the protocol of the DETR family, written for these tests, for repositories that are not on PyPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS = {"": 0, "_0": 1}  # the suffix of the keys of a layer, and the index of the layer in the outputs


def match_in_order(outputs: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Match the first queries of each image to its objects, in order."""
    return [(torch.arange(len(target["labels"])),) * 2 for target in targets]


class SetCriterion(nn.Module):
    """A criterion as RF-DETR has it: unweighted losses, one weight for each key."""

    class_key = "loss_ce"

    def __init__(self, losses: Sequence[str] = ("labels", "boxes", "size")) -> None:
        super().__init__()
        self.losses = list(losses)
        stems = {self.class_key: 2.0, "loss_bbox": 5.0, "loss_giou": 3.0, "loss_size": 7.0}
        self.weight_dict = {stem + suffix: weight for stem, weight in stems.items() for suffix in LAYERS}

    def loss_labels(
        self, outputs: Any, targets: Any, indices: Any, num_boxes: float, log: bool = True
    ) -> dict[str, Tensor]:
        loss = F.softplus(outputs["pred_logits"]).sum() / num_boxes
        return {self.class_key: loss} | ({"class_error": torch.tensor(12.5)} if log else {})

    def loss_boxes(
        self, outputs: Any, targets: Any, indices: Any, num_boxes: float, boxes_weight: Any = None
    ) -> dict[str, Tensor]:
        boxes = torch.cat([boxes[queries] for boxes, (queries, _) in zip(outputs["pred_boxes"], indices, strict=True)])
        objects = torch.cat([target["boxes"] for target in targets])
        differences = (boxes - objects).abs().sum() / num_boxes
        return {"loss_bbox": differences, "loss_giou": 2 * differences}

    def loss_size(self, outputs: Any, targets: Any, indices: Any, num_boxes: float) -> dict[str, Tensor]:
        return {"loss_size": outputs["pred_boxes"].square().mean()}

    def get_loss(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        methods = {"labels": self.loss_labels, "boxes": self.loss_boxes, "size": self.loss_size}
        return methods[name](*args, **kwargs)

    def forward(self, layers: list[dict[str, Tensor]], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        num_boxes = max(1.0, sum(len(target["labels"]) for target in targets))
        losses = {}
        for suffix, index in LAYERS.items():
            indices = match_in_order(layers[index], targets)
            for name in self.losses:
                logging = {"log": not suffix} if name == "labels" else {}
                terms = self.get_loss(name, layers[index], targets, indices, num_boxes, **logging)
                losses.update({key + suffix: value for key, value in terms.items()})
        return losses


class VarifocalCriterion(SetCriterion):
    """A criterion as RT-DETR and D-FINE have it: weighted losses, one weight for all layers, IoUs passed as values."""

    class_key = "loss_vfl"

    def __init__(self, losses: Sequence[str] = ("vfl", "boxes", "size")) -> None:
        super().__init__(losses)
        self.weight_dict = {key: weight for key, weight in self.weight_dict.items() if not key.endswith("_0")}

    def loss_labels_vfl(
        self, outputs: Any, targets: Any, indices: Any, num_boxes: float, values: Tensor | None = None
    ) -> dict[str, Tensor]:
        return self.loss_labels(outputs, targets, indices, num_boxes, log=False)

    def get_loss(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        terms = self.loss_labels_vfl(*args) if name == "vfl" else super().get_loss(name, *args, **kwargs)
        return {key: self.weight_dict[key] * value for key, value in terms.items()}


class MatchabilityCriterion(VarifocalCriterion):
    """A criterion as DEIM has it: NaN becomes 0 at the end."""

    class_key = "loss_mal"

    def __init__(self, losses: Sequence[str] = ("mal", "boxes", "size")) -> None:
        super().__init__(losses)

    def loss_labels_mal(
        self, outputs: Any, targets: Any, indices: Any, num_boxes: float, values: Tensor | None = None
    ) -> dict[str, Tensor]:
        return self.loss_labels(outputs, targets, indices, num_boxes, log=False)

    def get_loss(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        terms = self.loss_labels_mal(*args) if name == "mal" else SetCriterion.get_loss(self, name, *args, **kwargs)
        return {key: torch.nan_to_num(self.weight_dict[key] * value, nan=0.0) for key, value in terms.items()}


def layers_and_targets(seed: int = 0) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return outputs of two layers for two images, with 4 queries and 3 classes, and targets with 2 and 1 objects."""
    generator = torch.Generator().manual_seed(seed)

    def boxes(*shape: int) -> Tensor:
        return torch.cat([0.3 + 0.4 * torch.rand(*shape, 2, generator=generator), torch.full((*shape, 2), 0.3)], -1)

    layers = [
        {
            "pred_logits": torch.randn(2, 4, 3, generator=generator).requires_grad_(),
            "pred_boxes": boxes(2, 4).requires_grad_(),
        }
        for _ in LAYERS
    ]
    targets = [
        {"labels": torch.tensor([2, 0]), "boxes": boxes(2)},
        {"labels": torch.tensor([1]), "boxes": boxes(1)},
    ]
    return layers, targets
