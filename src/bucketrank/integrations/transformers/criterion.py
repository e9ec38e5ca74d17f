"""The ranking criterion for transformers: check the targets, rank all layers in one call, and weigh the box losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bucketrank.integrations.ranking_loss import Matching, RankingLoss, Target, centre_size_iou
from bucketrank.losses import self_balance

KEYS = ("class_labels", "boxes")
TENSORS = "a dict with the tensors class_labels and boxes"
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
CLASSIFICATION = ("labels", "vfl", "mal")  # names of the classification loss in the library's criteria
BOX_TERMS = ("loss_bbox", "loss_giou")
RANKING_TERMS = ("loss_rank", "loss_sort")


def check_targets(targets: Any, *, images: int, classes: int) -> None:
    """Raise unless ``targets`` has one target for each image, with one class label for each box.

    Values are checked only if they are on the CPU: elsewhere the check would cost a device sync in every step.
    """
    if not isinstance(targets, (list, tuple)) or len(targets) != images:
        got = f"{len(targets)} targets" if isinstance(targets, (list, tuple)) else type(targets).__name__
        raise ValueError(f"use_ranking_loss: expected labels with one target for each of {images} images, got {got}")
    for index, target in enumerate(targets):
        _check_target(target, f"labels[{index}]", classes)


def _check_target(target: Any, name: str, classes: int) -> None:
    if not isinstance(target, Mapping):
        raise TypeError(f"use_ranking_loss: expected {name} to be {TENSORS}, got {type(target).__name__}")
    for key in KEYS:
        if not isinstance(target.get(key), Tensor):
            got = type(target[key]).__name__ if key in target else f"the keys {', '.join(map(str, target))}"
            raise TypeError(f"use_ranking_loss: expected {name} to be {TENSORS}, got {got}; add {key}")
    labels, boxes = target["class_labels"], target["boxes"]
    if labels.dtype not in INTEGERS:
        raise TypeError(
            f"use_ranking_loss: expected {name}['class_labels'] of an integer dtype, got {labels.dtype}; "
            "convert them with .long()"
        )
    if labels.ndim != 1 or (boxes.shape != (len(labels), 4) and (boxes.numel() > 0 or len(labels) > 0)):
        raise ValueError(
            f"use_ranking_loss: expected {name} with class_labels of shape (n,) and boxes of shape (n, 4), got "
            f"{tuple(labels.shape)} and {tuple(boxes.shape)}; give every box one class label"
        )
    if labels.numel() and labels.device.type == "cpu":
        _check_labels(labels, name, classes)
    if boxes.numel() and boxes.device.type == "cpu":
        _check_boxes(boxes, name)


def _check_labels(labels: Tensor, name: str, classes: int) -> None:
    lowest, highest = torch.stack(labels.aminmax()).tolist()
    if lowest < 0 or highest >= classes:
        raise ValueError(
            f"use_ranking_loss: expected {name}['class_labels'] from 0 to {classes - 1}, got "
            f"{lowest if lowest < 0 else highest}; correct them, or build the model with more labels"
        )


def _check_boxes(boxes: Tensor, name: str) -> None:
    wrong = ~boxes.isfinite().all(1) | (boxes[:, 2:] < 0).any(1)
    if wrong.any():
        raise ValueError(
            f"use_ranking_loss: expected {name}['boxes'] as finite, relative (cx, cy, w, h) with sizes of at least 0, "
            f"got {boxes[wrong][0].tolist()}; correct them"
        )


class Layer(NamedTuple):
    """A layer's queries and the objects matched to them; ``logits`` is (B, Q, C), ``boxes`` (B, Q, 4)."""

    logits: Tensor
    boxes: Tensor
    targets: Sequence[Target]
    matching: Matching


class Positives(NamedTuple):
    """The matched queries of all layers, as indices into the concatenated tensors of all layers."""

    queries: Tensor  # (P,) rows in the boxes (sum of B Q, 4)
    entries: Tensor  # (P,) positions in the flat logits (sum of B Q C,)
    classes: Tensor  # (P,)
    object_boxes: Tensor  # (P, 4)


def rank_layers(ranking_loss: RankingLoss, layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Rank all (query, class) pairs of each layer, over the whole batch; the matched pairs are the positives.

    Each term has one value per layer. The number of operations does not depend on the number of layers or images.
    """
    logits = _join([layer.logits for layer in layers], -1)
    boxes = _join([layer.boxes.detach() for layer in layers], -1, 4)
    positives = _positives(layers)
    ious = centre_size_iou(boxes[positives.queries], positives.object_boxes)
    targets = torch.zeros_like(logits)
    # Class labels on a device are unchecked. A negative one, used as an index, would train another query.
    labels = ranking_loss.labels(ious).masked_fill(positives.classes < 0, torch.nan)
    targets[positives.entries] = labels.to(targets.dtype)
    return ranking_loss.terms(logits, targets, sizes=[layer.logits.numel() for layer in layers])


def matching_on(device: torch.device, matching: Matching) -> Matching:
    """Copy a matching to ``device`` in one transfer, without a device sync."""
    if all(queries.device.type == device.type for queries, _ in matching):
        return matching
    lengths = [len(queries) for queries, _ in matching]
    joined = torch.stack([torch.cat(list(part)) for part in zip(*matching, strict=True)])
    queries, objects = (part.split(lengths) for part in joined.to(device, non_blocking=True))
    return list(zip(queries, objects, strict=True))


def _join(tensors: Sequence[Tensor], *shape: int) -> Tensor:
    """Concatenate tensors (B, Q, ...), each viewed in ``shape``."""
    # Layers are mostly strided views of one stack: one operation copies all layers of equal shape, before the view.
    by_shape = groupby(tensors, key=lambda tensor: tensor.shape[1:])
    groups = [torch.cat(list(group)).view(shape) for _, group in by_shape]
    return groups[0] if len(groups) == 1 else torch.cat(groups)


def _positives(layers: Sequence[Layer]) -> Positives:
    pairs = [pair for layer in layers for pair in layer.matching]
    queries, objects = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
    # The encoder proposals may have their own targets. All other layers share theirs.
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


def _offsets(layers: Sequence[Layer], target_lists: Sequence[Sequence[Target]]) -> list[tuple[int, int, int, int]]:
    """Find the first query, first entry, number of classes and first object of each image in each layer."""
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


class RankingCriterion:
    """A library criterion that ranks all layers in one call instead of classifying them one by one.

    ``class_cost``, if not None, replaces the class cost of its matcher.
    """

    def __init__(self, library: Any, ranking_loss: RankingLoss, class_cost: float | None) -> None:
        self.library, self.ranking_loss = library, ranking_loss
        self.library_loss = library.get_loss
        self.layers: list[Layer] = []
        # id of a library matching: that matching, and its copy on the logits' device.
        self.on_device: dict[int, tuple[Matching, Matching]] = {}
        library.get_loss = self.get_loss
        if class_cost is not None:
            library.matcher.class_cost = class_cost

    def get_loss(
        self, loss: str, outputs: dict[str, Tensor], targets: Sequence[Target], indices: Matching, num_boxes: float
    ) -> dict[str, Tensor]:
        """Compute a layer's loss like the library, but for a classification loss only store the layer."""
        if id(indices) not in self.on_device:
            # The library indexes with CPU tensors: on a GPU every such index would cost a transfer and a device sync.
            self.on_device[id(indices)] = indices, matching_on(outputs["logits"].device, indices)
        matching = self.on_device[id(indices)][1]
        if loss in CLASSIFICATION:
            self.layers.append(Layer(outputs["logits"], outputs["pred_boxes"], targets, matching))
            return {}
        terms: dict[str, Tensor] = self.library_loss(loss, outputs, targets, matching, num_boxes)
        return terms

    def with_rankings(self, losses: dict[str, Tensor], *, weight: float = 1) -> dict[str, Tensor]:
        """Add the ranking terms of all layers, times ``weight``, before the box terms of their layer.

        ``losses`` are the terms that ``library`` returned. L1 and GIoU loss of every layer are each self-balanced to
        the layer's ranking loss. With a ``box_weight`` they stay unchanged: the sum applies the fixed weights.
        """
        suffixes = [key.removeprefix("loss_bbox") for key in losses if key.startswith("loss_bbox")]
        values = [weight * term for term in rank_layers(self.ranking_loss, self.layers).values()]
        # This object and the library's criterion refer to each other, so Python frees them late: release the layers.
        self.layers, self.on_device = [], {}
        totals = torch.stack(values).sum(0)
        # The library computes box terms in the same layer order as classification terms.
        layer_terms = zip(*(value.unbind() for value in values), strict=True)
        rankings = dict(zip(suffixes, zip(layer_terms, totals, strict=True), strict=True))
        complete = {}
        for key, value in losses.items():
            stem = next((stem for stem in BOX_TERMS if key.startswith(stem)), None)
            if stem is None:
                complete[key] = value
                continue
            suffix = key.removeprefix(stem)
            terms, total = rankings[suffix]
            if stem == BOX_TERMS[0]:
                complete |= {name + suffix: term for name, term in zip(RANKING_TERMS, terms, strict=False)}
            complete[key] = value if self.ranking_loss.box_weight is not None else self_balance(value, to=total)
        return complete


def weighted_sum(losses: dict[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Sum the terms of all layers, each times the weight named like it without the layer suffix."""
    return torch.stack(
        [weight * value for key, value in losses.items() for stem, weight in weights.items() if key.startswith(stem)]
    ).sum()
