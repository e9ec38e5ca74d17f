"""Rankings of all sorts in one call of the fused kernel: the definition's numbers, and the bits of single calls."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bucketrank import alrp_loss, rank_sort_loss
from bucketrank.losses import fused, sorting

from . import oracle
from .cases import LOSSES, RANKING, assert_same, hard_inputs, localisation_errors, synthetic, total, use_backend

every_loss = pytest.mark.parametrize("name", RANKING)


def _answer(name: str, logits: Tensor, targets: Tensor, *, delta: float, **settings: Any) -> oracle.Answer:
    """Return the values, and the gradient of each summed over the rankings."""
    leaf = logits.detach().clone().requires_grad_()
    with use_backend("fused"):
        terms = LOSSES[name].compute(leaf, targets, delta=delta, **settings)
        gradients = [torch.autograd.grad(term.sum(), leaf, retain_graph=True)[0] for term in terms]
    return oracle.Answer([term.detach() for term in terms], gradients)


def _one_by_one(name: str, logits: Tensor, targets: Tensor, sizes: list[int], *, delta: float) -> oracle.Answer:
    parts = zip(logits.split(sizes), targets.split(sizes), strict=True)
    each = [_answer(name, *part, delta=delta) for part in parts]
    values = [torch.stack(value) for value in zip(*(answer.values for answer in each), strict=True)]
    return oracle.Answer(values, [torch.cat(part) for part in zip(*(one.gradients for one in each), strict=True)])


def _assert_same_bits(name: str, logits: Tensor, targets: Tensor, sizes: list[int], *, delta: float) -> None:
    together = _answer(name, logits, targets, delta=delta, sizes=sizes, reduction="none")
    apart = _one_by_one(name, logits, targets, sizes, delta=delta)
    for ours, theirs in zip(together.values + together.gradients, apart.values + apart.gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def _rankings(sizes: list[int], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Rankings with ties, equal labels and ignored entries, of which some have no positive."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.rand(sum(sizes), generator=generator) for _ in range(3)]
    logits = torch.where(draw[0] < 0.3, (draw[1] * 8).round() / 8, draw[1] * 3 - 1).to(dtype)
    targets = torch.where(draw[2] < 0.3, (draw[2] * 20).ceil() / 8, 0.0).to(dtype)
    return logits, targets.masked_fill(draw[2] > 0.9, -1)


@pytest.mark.sampled(7)
@every_loss
@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    "sizes",
    [[1], [0, 0], [0, 1, 2, 3, 0, 50, 1], [16] * 60, [5000, 1, 7, 2000, 0], list(range(40))],
    ids=["one", "empty", "few", "equal", "thousands", "ragged"],
)
def test_sizes_of_all_sorts(sizes: list[int], delta: float, name: str) -> None:
    logits, targets = _rankings(sizes)
    _assert_same_bits(name, logits, targets, sizes, delta=delta)
    double = logits.double(), targets.double()
    got = _answer(name, *double, delta=delta, sizes=sizes, reduction="none")
    parts = zip(double[0].split(sizes), double[1].split(sizes), strict=True)
    each = [LOSSES[name].oracle(*part, delta) for part in parts]
    values = [
        torch.stack([torch.as_tensor(x) for x in value]) for value in zip(*(one.values for one in each), strict=True)
    ]
    gradients = [torch.cat(part) for part in zip(*(one.gradients for one in each), strict=True)]
    assert_same(got, oracle.Answer(values, gradients), relative=1e-9)


@pytest.mark.sampled(4)
@every_loss
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=20), seed=st.integers(0, 99), smooth=st.booleans())
def test_bits_of_single_calls(name: str, sizes: list[int], seed: int, smooth: bool) -> None:
    _assert_same_bits(name, *_rankings(sizes, seed=seed), sizes, delta=0.4 if smooth else 0.0)


@every_loss
def test_hard_rankings_together(name: str) -> None:
    # "outlier" needs the definition at a tiny delta, the others do not.
    parts = [*hard_inputs().values(), (torch.tensor([0.0, torch.nan, 1.0]), torch.tensor([1.0, 0.0, -1.0]))]
    logits, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    sizes = [len(part) for part, _ in parts]
    for delta in (0.0, 0.5, 1e-5):
        _assert_same_bits(name, logits, targets, sizes, delta=delta)


@every_loss
@pytest.mark.usefixtures("two_threads")
def test_large_rankings_are_split_between_threads(name: str, monkeypatch) -> None:
    monkeypatch.setattr(fused, "MIN_ENTRIES", 100)
    monkeypatch.setattr(fused, "MIN_POSITIVES", 40)
    sizes = [30, 1000, 0, 150, 700, *[20] * 40]
    parts = fused.split_rankings(np.array(sizes), 100, 64, within=True)
    assert sum(begin == 1 for begin, *_ in parts) == sum(begin == 4 for begin, *_ in parts) == 4
    logits, targets = _rankings(sizes)
    logits[1010] = torch.nan  # after the first part of its ranking
    targets[1010] = 0
    _assert_same_bits(name, logits, targets, sizes, delta=0.3)


@pytest.mark.parametrize("cost", [0, 64])
@pytest.mark.parametrize("within", [False, True])
def test_parts_cover_every_member_once(cost: int, within: bool, monkeypatch) -> None:
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for sizes in ([], [0], [5], [100], [3] * 50, [100, 3, 0, 250, 1], [0, 0, 90]):
            parts = fused.split_rankings(np.array(sizes, int), 10, cost, within=within)
            covered = [
                (ranking, member)
                for begin, end, start, stop in parts
                for ranking in range(begin, end)
                for member in range(start, min(stop, sizes[ranking]))
            ]
            assert covered == [(ranking, member) for ranking, size in enumerate(sizes) for member in range(size)]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 33, 500, sorting.MAX_SORTED, sorting.MAX_SORTED + 1])
def test_sorts_each_ranking_and_keeps_ties_in_order(size: int) -> None:
    values = np.random.default_rng(0).integers(0, 50, 2 * size + 3).astype(float)
    first = np.array([0, size, size, size + 3, 2 * size + 3])
    order = np.arange(values.size)
    sorting.sort_rankings(0, 4, first, values, order)
    for begin, end in itertools.pairwise(first):
        expected = begin + values[begin:end].argsort(kind="stable")
        if end - begin > sorting.MAX_SORTED:  # left to numpy
            expected = np.arange(begin, end)
        assert order[begin:end].tolist() == expected.tolist()


@every_loss
def test_a_ranking_does_not_depend_on_its_batch(name: str) -> None:
    # Ragged lists with graded targets, as of a reranker: reordered, one by one, or batched together.
    sizes = [12, 3, 40, 1, 7, 0, 25]
    logits, targets = _rankings(sizes, seed=3)
    lists = [*zip(logits.split(sizes), targets.split(sizes), strict=True)]
    original = _answer(name, logits, targets, delta=0.5, sizes=sizes, reduction="none")
    order = [4, 6, 0, 5, 2, 1, 3]
    mixed = [torch.cat([lists[k][column] for k in order]) for column in (0, 1)]
    reordered = _answer(name, *mixed, delta=0.5, sizes=[sizes[k] for k in order], reduction="none")
    for ours, theirs in zip(reordered.values, original.values, strict=True):
        assert torch.equal(ours, theirs[order])
    for ours, theirs in zip(reordered.gradients, original.gradients, strict=True):
        assert torch.equal(ours, torch.cat([theirs.split(sizes)[k] for k in order]))
    mean = _answer(name, logits, targets, delta=0.5, sizes=sizes)
    mean_reordered = _answer(name, *mixed, delta=0.5, sizes=[sizes[k] for k in order])
    torch.testing.assert_close(mean_reordered.values, mean.values)


def test_a_second_backward_pass_finds_the_buckets_again() -> None:
    sizes = [100, 0, 30, 2000]
    logits, targets = _rankings(sizes)
    logits[120] = torch.nan
    targets[120] = 0
    logits.requires_grad_()
    with use_backend("fused"):
        terms = rank_sort_loss(logits, targets, sizes=sizes, reduction="none")
        first, second = (torch.autograd.grad(total(map(torch.sum, terms)), logits, retain_graph=True)[0] for _ in "12")
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    assert first[:100].isfinite().all()
    assert first[100:130].isnan().equal(targets[100:130] >= 0)


def test_localisation_errors_of_broken_rankings_get_nan() -> None:
    logits, targets = synthetic(60, 20)
    logits[targets[:30].argmin()] = torch.inf
    errors = localisation_errors(targets).requires_grad_()
    with use_backend("fused"):
        alrp_loss(logits, targets, errors, sizes=[30, 30], reduction="none").localisation.sum().backward()
    assert errors.grad is not None
    positives = int((targets[:30] > 0).sum())
    assert errors.grad.isnan().tolist() == [True] * positives + [False] * (20 - positives)
