"""Launches and waits of the host, which cost time on a GPU, counted on the CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.launches import Launches, count_launches
from bucketrank import ap_loss, rank_sort_loss
from bucketrank.losses.triton import kernel_observers

from .cases import synthetic, total, use_backend


def _count(loss, size: int, positives: int, **settings) -> Launches:
    logits, targets = synthetic(size, positives)
    logits.requires_grad_()
    with use_backend("device"), count_launches() as counted:
        terms = loss(logits, targets, **settings)
        (terms if isinstance(terms, torch.Tensor) else total(terms)).backward()
    return counted


@pytest.mark.parametrize(
    ("loss", "positives", "launches"),
    [(ap_loss, 1_000, 160), (rank_sort_loss, 1_000, 210), (rank_sort_loss, 4_096, 250)],
)
def test_exact_losses_in_torch_operations(loss, positives: int, launches: int) -> None:
    counted = _count(loss, 100_000, positives)
    assert counted.launches <= launches
    assert counted.waits <= 2


@pytest.mark.parametrize("loss", [ap_loss, rank_sort_loss])
@pytest.mark.parametrize("settings", [{"delta": 0}, {"method": "bucketed"}, {"method": "pairwise"}], ids=str)
def test_no_method_waits_more_than_twice(loss, settings) -> None:
    assert _count(loss, 20_000, 200, **settings).waits <= 2


def test_a_batch_waits_as_often_as_one_ranking() -> None:
    assert _count(rank_sort_loss, 20_000, 200, sizes=[5_000] * 4).waits <= 2
    assert _count(rank_sort_loss, 20_000, 200, sizes=[19_000, 1_000], reduction="none").waits <= 2


def test_views_are_no_launches() -> None:
    matrix = torch.ones(4, 4)
    with count_launches() as counted:
        matrix.view(16).expand(2, 16).t()[3:].unbind()
    assert (counted.launches, counted.waits) == (0, 0)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.nonzero(),
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.long().bincount(),
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
    ],
)
def test_what_waits(read) -> None:
    values = torch.tensor([1.0, 0.0, 2.0])
    with count_launches() as counted:
        read(values)
    assert counted.waits == 1


def test_what_does_not_wait() -> None:
    values = torch.tensor([1.0, 0.0, 2.0])
    repeats = torch.tensor([1, 0, 2])
    with count_launches() as counted:
        values.repeat_interleave(repeats, output_size=3)
        values[repeats]
        torch.where(values > 0, values, 0).sum()
    assert counted.waits == 0


def test_kernels_are_counted_too() -> None:
    with count_launches() as counted:
        for _ in range(2):
            for observe in kernel_observers:
                observe("fill")
    assert kernel_observers == []
    assert counted.kernels == {"fill": 2}
    assert (counted.launches, counted.waits) == (2, 0)


def test_allocations_are_no_launches() -> None:
    values = torch.ones(3)
    with count_launches() as counted:
        torch.empty(3), torch.empty_like(values), values.new_empty(2), torch.zeros(3)
    assert counted.operations == {"zeros": 1}
    assert counted.allocations == {"empty": 1, "empty_like": 1, "new_empty": 1}
