"""The value and gradient of every faithful way, compared with the definition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketrank import alrp_loss
from bucketrank.losses import exact, pairwise
from bucketrank.losses.exact import LookUp

from . import oracle
from .cases import (
    DELTAS,
    FAITHFUL,
    LOSSES,
    RANKING,
    Way,
    answer,
    assert_same,
    hard_inputs,
    identify,
    pairs,
    synthetic,
    triples,
    use_backend,
)

HARD = hard_inputs()


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "delta", "way"), triples(skip=["bucketed"]), ids=identify)
@pytest.mark.parametrize("case", HARD)
def test_equals_the_definition(case: str, name: str, delta: float, way: Way) -> None:
    logits, targets = HARD[case]
    loss = LOSSES[name]
    # float64, where nothing but the method can differ; float32 rounding has its own tests.
    got = answer(loss.compute, logits.double(), targets.double(), delta=delta, way=way)
    assert_same(got, loss.oracle(logits, targets, delta), relative=1e-9)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "delta", "way"), triples(RANKING, skip=["bucketed", "pairwise"]), ids=identify)
@pytest.mark.parametrize("case", HARD)
def test_float32_is_within_a_millionth_of_the_definition(case: str, name: str, delta: float, way: Way) -> None:
    logits, targets = HARD[case]
    loss = LOSSES[name]
    assert_same(answer(loss.compute, logits, targets, delta=delta, way=way), loss.oracle(logits, targets, delta))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("name", RANKING)
@pytest.mark.parametrize(("size", "positives"), [(3_000, 1), (8_000, 2_000), (70_000, 300)])
def test_larger_inputs_against_pairwise(size: int, positives: int, name: str, delta: float) -> None:
    logits, targets = synthetic(size, positives)
    loss = LOSSES[name].compute
    expected = answer(loss, logits.double(), targets.double(), delta=delta, way=("pairwise", "torch"))
    for way in FAITHFUL[1:]:
        assert_same(answer(loss, logits, targets, delta=delta, way=way), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("positives", "scale", "delta"), [(20_000, 1.0, 0.5), (10_000, 1e3, 0.1), (10_000, 1.0, 0.0)])
def test_many_positives_against_pairwise(
    positives: int, scale: float, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same comparisons in a third of the time: of chunks this small, none asks the system for memory again.
    monkeypatch.setattr(pairwise, "CHUNK", 1 << 17)
    logits, targets = synthetic(positives + 2_000, positives)
    logits = logits * scale
    loss = LOSSES["rank_sort"].compute
    expected = answer(loss, logits.double(), targets.double(), delta=delta, way=("pairwise", "torch"))
    for way in FAITHFUL[1:]:
        assert_same(answer(loss, logits, targets, delta=delta, way=way), expected)


@pytest.mark.slow
def test_backends_agree_with_a_hundred_thousand_positives() -> None:
    # More than pairwise can check: a P x P matrix would take 80 GB, and P x P is beyond the integers of 32 bits.
    logits, targets = synthetic(2_000_000, 100_000)
    loss = LOSSES["rank_sort"].compute
    fused = answer(loss, logits, targets, delta=0.5, way=("exact", "fused"))
    for backend in ("torch", "device"):
        assert_same(answer(loss, logits, targets, delta=0.5, way=("exact", backend)), fused)


@pytest.mark.parametrize("way", FAITHFUL[1:], ids="-".join)
def test_a_delta_below_the_digits_of_the_logits_is_still_exact(way: Way) -> None:
    # At 1e6 the edges s +- 1e-12 are rounded to s; a tie must still count as 1/2.
    logits = torch.tensor([1e6, 1e6, 1e6 + 1, 1e6 - 1])
    targets = torch.tensor([0.5, 0.0, 0.0, 0.9])
    loss = LOSSES["rank_sort"]
    expected = loss.oracle(logits, targets, 1e-12)
    # The first positive: half the tied negative and the one above, against itself: 1.5 / 2; the last: 2 / 3.5.
    torch.testing.assert_close(expected.values[0].item(), (1.5 / 2 + 2 / 3.5) / 2)
    assert_same(answer(loss.compute, logits, targets, delta=1e-12, way=way), expected)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "way"), pairs(RANKING, skip=["bucketed", "pairwise"]), ids=identify)
@pytest.mark.parametrize("finer", [1e-3, 1e-6, 1e-8, 2e-9])
def test_clusters_far_apart_with_a_delta_as_fine_as_exact_bucketing_resolves(finer: float, name: str, way: Way) -> None:
    # The sums of one cluster are not to drown in its distance from the others, a billion times delta.
    noise, targets = synthetic(2_000, 200)
    logits = torch.arange(2_000, dtype=torch.float64) % 7 * (1e6 / 7) + noise.double() * 1e6 * finer
    loss = LOSSES[name]
    got = answer(loss.compute, logits, targets.double(), delta=1e6 * finer, way=way)
    assert_same(got, loss.oracle(logits, targets, 1e6 * finer))


@pytest.mark.slow
@pytest.mark.parametrize("way", FAITHFUL, ids="-".join)
def test_alrp_at_the_localisation_errors_equals_the_definition(way: Way) -> None:
    for logits, targets in HARD.values():
        localisation = torch.linspace(0.1, 1.9, int((targets > 0).sum()), dtype=torch.float64)
        for delta in DELTAS:
            leaf, errors = logits.double().requires_grad_(), localisation.clone().requires_grad_()
            with use_backend(way[1]):
                terms = alrp_loss(leaf, targets, errors, delta=delta, method=way[0])
                gradients = [torch.autograd.grad(term, leaf, retain_graph=True)[0] for term in terms]
                (to_errors,) = torch.autograd.grad(terms.localisation, errors)
            expected, errors_expected = oracle.alrp(logits, targets, localisation, delta)
            got = oracle.Answer([*map(torch.Tensor.detach, terms)], gradients)
            assert_same(got, expected, relative=1e-9)
            torch.testing.assert_close(to_errors, errors_expected)


# The table that finds buckets in torch operations, against a plain binary search.


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
    between = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    beside = [math.nextafter(edge, towards) for edge in edges for towards in (-math.inf, math.inf)]
    _assert_same_as_binary_search(edges, between + beside, torch.float64)


def test_more_edges_than_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "MAX_CELLS", 16)
    edges = [k / 7 for k in range(1000)]
    assert LookUp(torch.tensor(edges)).before.numel() == 16
    _assert_same_as_binary_search(edges, [edge + 0.01 for edge in edges], torch.float32)


def test_steps_do_not_grow_with_the_number_of_edges() -> None:
    # What it is for: evenly spread edges need no more halving in large numbers than in small ones.
    few, many = (LookUp(torch.linspace(0, 1, size, dtype=torch.float64)).steps for size in (100, 100_000))
    assert few == many
