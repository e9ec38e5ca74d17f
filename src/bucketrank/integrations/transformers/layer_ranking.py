"""The rankings of all layers of one training step, in one call of the ranking loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from bucketrank.integrations.matched_queries import Matching, centre_size_iou
from bucketrank.integrations.ranking_loss import RankingLoss

Target = dict[str, Tensor]


class Layer(NamedTuple):
    """The queries of a layer and the objects matched to them; ``logits`` is (B, Q, C), ``boxes`` (B, Q, 4)."""

    logits: Tensor
    boxes: Tensor
    targets: list[Target]
    matching: Matching


class Positives(NamedTuple):
    """The matched queries of all layers, numbered through the concatenated tensors of all layers."""

    queries: Tensor  # (P,) rows of the boxes (sum of B Q, 4)
    entries: Tensor  # (P,) positions in the flat logits (sum of B Q C,)
    classes: Tensor  # (P,)
    object_boxes: Tensor  # (P, 4)


def rank_layers(ranking_loss: RankingLoss, layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Rank all (query, class) pairs of each layer, over the whole batch; the matched pairs are the positives.

    Each term has one value per layer. The number of operations does not depend on the numbers of layers and images.
    """
    logits = _join([layer.logits for layer in layers], -1)
    boxes = _join([layer.boxes.detach() for layer in layers], -1, 4)
    positives = _positives(layers)
    ious = centre_size_iou(boxes[positives.queries], positives.object_boxes)
    targets = torch.zeros_like(logits)
    # On a device nobody has checked the class labels. As an index, a negative one would train another query.
    labels = ranking_loss.labels(ious).masked_fill(positives.classes < 0, torch.nan)
    targets[positives.entries] = labels.to(targets.dtype)
    return ranking_loss.terms(logits, targets, sizes=[layer.logits.numel() for layer in layers])


def matching_on(device: torch.device, matching: Matching) -> Matching:
    """Copy a matching to ``device`` in one transfer, for which the host does not wait."""
    if all(queries.device.type == device.type for queries, _ in matching):
        return matching
    lengths = [len(queries) for queries, _ in matching]
    joined = torch.stack([torch.cat(list(part)) for part in zip(*matching, strict=True)])
    queries, objects = (part.split(lengths) for part in joined.to(device, non_blocking=True))
    return list(zip(queries, objects, strict=True))


def _join(tensors: Sequence[Tensor], *shape: int) -> Tensor:
    """Concatenate tensors (B, Q, ...) after they are viewed in ``shape``."""
    # Layers are mostly strided views of one stack. In their own shape one operation copies all that are of one shape.
    by_shape = groupby(tensors, key=lambda tensor: tensor.shape[1:])
    groups = [torch.cat(list(group)).view(shape) for _, group in by_shape]
    return groups[0] if len(groups) == 1 else torch.cat(groups)


def _positives(layers: Sequence[Layer]) -> Positives:
    pairs = [pair for layer in layers for pair in layer.matching]
    queries, objects = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
    # The encoder's proposals may have targets of their own. Layers share all other targets.
    target_lists = list({id(layer.targets): layer.targets for layer in layers}.values())
    targets = [target for each in target_lists for target in each]
    lengths = [len(matched) for matched, _ in pairs]
    offsets = torch.tensor(_offsets(layers, target_lists)).repeat_interleave(
        torch.tensor(lengths), dim=0, output_size=sum(lengths)
    )
    first_query, first_entry, classes, first_object = offsets.to(queries.device, non_blocking=True).unbind(1)
    owners = first_object + objects
    labels = torch.cat([target["class_labels"] for target in targets])[owners]
    object_boxes = torch.cat([target["boxes"] for target in targets])[owners]
    return Positives(first_query + queries, first_entry + queries * classes + labels, labels, object_boxes)


def _offsets(layers: Sequence[Layer], target_lists: Sequence[list[Target]]) -> list[tuple[int, int, int, int]]:
    """Return, for each image of each layer, its first query, first entry, number of classes and first object."""
    first_objects, number = {}, 0
    for targets in target_lists:
        numbers = []
        for target in targets:
            numbers.append(number)
            number += len(target["class_labels"])
        first_objects[id(targets)] = numbers
    offsets, query, entry = [], 0, 0
    for layer in layers:
        _, queries, classes = layer.logits.shape
        for first_object in first_objects[id(layer.targets)]:
            offsets.append((query, entry, classes, first_object))
            query += queries
            entry += queries * classes
    return offsets
