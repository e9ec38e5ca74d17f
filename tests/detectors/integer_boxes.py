"""Boxes with integer coordinates: overlaps and distances are exact in float32, and ties are frequent."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

Box = tuple[float, ...]


def tensor(boxes: list[Box] | list[list[int]]) -> Tensor:
    return torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)


@st.composite
def integer_boxes(draw: st.DrawFn, least: int = 0, most: int = 10) -> list[Box]:
    corner, side = st.integers(0, 12), st.integers(0, 9)
    drawn = draw(st.lists(st.tuples(corner, corner, side, side), min_size=least, max_size=most))
    return [(x, y, x + width, y + height) for x, y, width, height in drawn]


@st.composite
def pyramids(draw: st.DrawFn) -> tuple[list[Box], list[int]]:
    """Draw anchors, one or two squares per cell of a few small maps, and the number of anchors per level."""
    anchors: list[Box] = []
    per_level = []
    for level in range(draw(st.integers(1, 3))):
        stride = 2 * 2**level
        rows, columns = draw(st.integers(0, 4)), draw(st.integers(1, 4))
        sides = draw(st.lists(st.sampled_from([stride, 2 * stride, 3 * stride]), min_size=1, max_size=2))
        before = len(anchors)
        anchors += [
            (x * stride - side / 2, y * stride - side / 2, x * stride + side / 2, y * stride + side / 2)
            for y in range(rows)
            for x in range(columns)
            for side in sides
        ]
        per_level.append(len(anchors) - before)
    return anchors, per_level
