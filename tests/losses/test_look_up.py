"""The table that finds buckets in torch operations, against a plain binary search."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketrank.losses import look_up
from bucketrank.losses.look_up import LookUp

finite = st.floats(allow_nan=False, allow_infinity=False)
# Few different values, so that edges and numbers meet.
coarse = st.integers(-3, 3).map(float)


def _assert_same_as_binary_search(edges: list[float], numbers: list[float], dtype: torch.dtype) -> None:
    ascending = torch.tensor(edges, dtype=dtype).sort().values
    asked = torch.cat([torch.tensor([*numbers, -math.inf, math.inf], dtype=dtype), ascending])
    expected = torch.searchsorted(ascending, asked, right=True, out_int32=True)
    assert LookUp(ascending)(asked).tolist() == expected.tolist()


@given(
    st.lists(finite | coarse, min_size=1, max_size=50),
    st.lists(finite | coarse, max_size=50),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_edges_and_numbers(edges: list[float], numbers: list[float], dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).min
    edges, numbers = ([min(max(x, least), -least) for x in xs] for xs in (edges, numbers))
    _assert_same_as_binary_search(edges, numbers, dtype)


@pytest.mark.parametrize(
    "edges",
    [
        [0.0],
        [5.0] * 100,
        [0.0, 5e-324],  # so close that cells per unit overflow
        [-1.7e308, 0.0, 1.7e308],  # so far apart that their range does
        [0.0, 1.0] + [0.5 + 1e-9 * k for k in range(1000)],  # nearly all in one cell
        [10.0**k for k in range(-30, 30)],
    ],
    ids=["one", "equal", "close", "far", "clustered", "geometric"],
)
def test_edges_with_a_difficulty(edges: list[float]) -> None:
    between = [(a + b) / 2 for a, b in pairwise(edges)]
    beside = [math.nextafter(edge, towards) for edge in edges for towards in (-math.inf, math.inf)]
    _assert_same_as_binary_search(edges, between + beside, torch.float64)


def test_more_edges_than_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_up, "MOST_CELLS", 16)
    edges = [k / 7 for k in range(1000)]
    assert LookUp(torch.tensor(edges)).before.numel() == 16
    _assert_same_as_binary_search(edges, [edge + 0.01 for edge in edges], torch.float32)


def test_steps_do_not_grow_with_the_number_of_edges() -> None:
    # What it is for: evenly spread edges need no more halving in large numbers than in small ones.
    few, many = (LookUp(torch.linspace(0, 1, size, dtype=torch.float64)).steps for size in (100, 100_000))
    assert few == many
