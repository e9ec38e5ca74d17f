"""Rename the tensors of other libraries to ours by a table, and fit class layers to a detector's own classes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

# What the rows of a tensor stand for, where a detector with other classes or another loss has other rows.
Rows = Literal[
    "",
    "classes",  # one row per class, then maybe one for the background
    "class_boxes",  # four rows per class, or four for all
    "class_rows",  # one row per class
    "anchor_classes",  # one row per anchor and class
    "proposer_classes",  # one row per class, of which only the first is used
    "marks",  # one number for all queries of an auxiliary head
    "deltas",  # four rows per anchor of an RPN or RetinaNet
    "quality",  # one row per anchor
]


@dataclass(frozen=True)
class Row:
    """A pattern of names, our names with the groups of the pattern, and the meaning of the rows.

    Several names share the tensor in equal parts; a tensor without a name is left out. A name that ends in ``[i]`` is
    entry i of a vector.
    """

    pattern: str
    names: tuple[str, ...]
    rows: Rows = ""
    change: Callable[[Tensor], Tensor] | None = None

    @cached_property
    def expression(self) -> re.Pattern[str]:
        return re.compile(self.pattern)


def row(pattern: str, *names: str, rows: Rows = "", change: Callable[[Tensor], Tensor] | None = None) -> Row:
    """Return a row of the table; ``$`` stands for the end of a name, weight or bias."""
    ending = r"(weight|bias)"
    group = re.compile(pattern.replace("$", ending)).groups
    return Row(pattern.replace("$", ending), tuple(name.replace("$", rf"\{group}") for name in names), rows, change)


@dataclass(frozen=True)
class Translated:
    """Tensors under our names, the meaning of their rows, and the names that no row of the table has."""

    state: dict[str, Tensor]
    rows: dict[str, Rows]
    unknown: list[str]


def translate(state: Mapping[str, Tensor], table: tuple[Row, ...]) -> Translated:
    """Rename, split and stack the tensors of another library."""
    renamed: dict[str, Tensor] = {}
    meanings: dict[str, Rows] = {}
    entries: dict[str, dict[int, Tensor]] = {}
    unknown = []
    for key, tensor in state.items():
        for each in table:
            if match := each.expression.fullmatch(key):
                break
        else:
            unknown.append(key)
            continue
        changed = each.change(tensor) if each.change is not None else tensor
        names = [match.expand(name) for name in each.names]
        parts = changed.chunk(len(names)) if len(names) > 1 else (changed,)
        for name, part in zip(names, parts, strict=False):
            vector, bracket, number = name.partition("[")
            if bracket:
                entries.setdefault(vector, {})[int(number.rstrip("]"))] = part
            else:
                renamed[name], meanings[name] = part, each.rows
    for vector, values in entries.items():
        renamed[vector], meanings[vector] = torch.stack([values[i].reshape(()) for i in sorted(values)]), ""
    # Deformable convolutions: ours multiply by 2 sigmoid(m), the published ones by sigmoid(m).
    for name in [name for name in renamed if name.endswith(".predictor.weight")]:
        convolution = name.replace(".predictor.weight", ".weight")
        if convolution in renamed:
            renamed[convolution] = renamed[convolution] / 2
    return Translated(renamed, meanings, unknown)


@dataclass(frozen=True)
class Adaptation:
    """The change of class layers and box deltas for a detector with other classes or another loss."""

    labels: list[int] | None  # row of each of the model's classes; None if class layers keep their values
    num_labels: int  # rows of an anchor
    background: int | None  # row of the background logit; None if the weights have none
    softmax: bool  # whether the model has one
    delta_factors: tuple[float, float, float, float]  # factors on the weights' box deltas that make them the model's
    proposer_rows: int = 0  # logits of the model's proposals, in Co-DETR
    marks: int = 0  # numbers that mark an auxiliary head's queries, in Co-DETR

    def __call__(self, rows: Rows, tensor: Tensor) -> Tensor | None:
        """Return the tensor for the model; None if it keeps its values."""
        rest = tensor.shape[1:]
        if rows == "deltas":
            factors = tensor.new_tensor(self.delta_factors).reshape(4, *[1] * len(rest))
            return (tensor.reshape(-1, 4, *rest) * factors).flatten(0, 1)
        if rows == "proposer_classes":
            return tensor[: self.proposer_rows] if self.proposer_rows <= len(tensor) else None
        if rows == "marks":
            return tensor.expand(self.marks)
        if rows in ("", "quality") or (rows == "class_boxes" and len(tensor) == 4):
            return tensor
        if self.labels is None:
            return None
        if rows == "anchor_classes":
            return tensor.reshape(-1, self.num_labels, *rest)[:, self.labels].flatten(0, 1)
        if rows == "class_boxes":
            return tensor.reshape(-1, 4, *rest)[self.labels].flatten(0, 1)
        if rows == "classes" and self.background is not None:
            background = tensor[self.background]
            if self.softmax:
                return torch.cat([tensor[self.labels], background[None]])
            return tensor[self.labels] - background  # the logit of a class against the background
        if rows == "classes" and self.softmax:
            return None  # the weights have no background logit to start from
        return tensor[self.labels]
