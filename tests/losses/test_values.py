"""Losses worked out by hand; a reader can redo the arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from bucketrank import alrp_loss, ap_loss, dr_loss, rank_sort_loss

from .cases import EVERY, FAITHFUL, Way, use_backend

# Ranked: 3 (positive, IoU 0.5), 2 (negative), 1 (positive, IoU 0.9), 0 (negative).
LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.0])
TARGETS = torch.tensor([0.5, 0.0, 0.9, 0.0])


def _gradient(term: torch.Tensor, leaf: torch.Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(term, leaf, retain_graph=True)
    return gradient.tolist()


@pytest.mark.parametrize("way", EVERY, ids="-".join)
def test_rank_sort_with_a_hard_step(way: Way) -> None:
    leaf = LOGITS.clone().requires_grad_()
    with use_backend(way[1]):
        ranking, sorting = rank_sort_loss(leaf, TARGETS, delta=0, method=way[0])
        # Ranking: no negative above 3; one of three at or above 1. Sorting: above 1 stand both, (0.5 + 0.1) / 2, where
        # only the better should: 0.1. So 0.2 for it, nothing for 3.
        torch.testing.assert_close(ranking.item(), (0 + 1 / 3) / 2)
        torch.testing.assert_close(sorting.item(), (0 + 0.2) / 2)
        torch.testing.assert_close(_gradient(ranking, leaf), [0.0, 1 / 6, -1 / 6, 0.0])
        torch.testing.assert_close(_gradient(sorting, leaf), [0.1, 0.0, -0.1, 0.0])


@pytest.mark.parametrize("way", FAITHFUL, ids="-".join)
def test_rank_sort_with_a_smoothed_step(way: Way) -> None:
    # delta 2: H(x) = x / 4 + 1/2 within 2. Of 3: itself 1/2, negatives at -1 and -3: 1/4 and 0, the positive at -2: 0.
    # Of 1: itself 1/2, the negatives at +1 and -1: 3/4 and 1/4, the positive at +2: 1.
    leaf = LOGITS.clone().requires_grad_()
    with use_backend(way[1]):
        ranking, sorting = rank_sort_loss(leaf, TARGETS, delta=2, method=way[0])
        first, second = 0.25 / 0.75, 1 / 2.5
        torch.testing.assert_close(ranking.item(), (first + second) / 2)
        # Of 1: (1 * 0.5 + 0.5 * 0.1) / 1.5 stands above, 0.1 should.
        missorted = 0.55 / 1.5 - 0.1
        torch.testing.assert_close(sorting.item(), missorted / 2)
        pushed = [(0.25 / 0.75 + 0.75 / 2.5) / 2, (0 + 0.25 / 2.5) / 2]
        torch.testing.assert_close(_gradient(ranking, leaf), [-first / 2, pushed[0], -second / 2, pushed[1]])
        torch.testing.assert_close(_gradient(sorting, leaf), [missorted / 2, 0.0, -missorted / 2, 0.0])


@pytest.mark.parametrize("way", FAITHFUL, ids="-".join)
def test_interpolated_ap(way: Way) -> None:
    # Ranked: - + + -, hard step: precisions from below 2/3 and 1/2; the upper takes 2/3 too.
    logits, targets = torch.tensor([3.0, 2.0, 1.0, 0.0], requires_grad=True), torch.tensor([0.0, 1.0, 1.0, 0.0])
    with use_backend(way[1]):
        loss = ap_loss(logits, targets, delta=0, method=way[0], interpolate=True)
        torch.testing.assert_close(loss.item(), 1 / 3)
        # The mass pushed down equals the mass lifted: 1/3 for each positive, halved.
        torch.testing.assert_close(_gradient(loss, logits), [1 / 3, -1 / 6, -1 / 6, 0.0])
        # Without interpolation the upper keeps 1/2.
        plain = ap_loss(logits, targets, delta=0, method=way[0])
        torch.testing.assert_close(plain.item(), (1 / 2 + 1 / 3) / 2)


@pytest.mark.parametrize("way", FAITHFUL, ids="-".join)
def test_alrp(way: Way) -> None:
    logits = LOGITS.clone().requires_grad_()
    boxes = torch.tensor([0.2, 0.6], requires_grad=True)
    with use_backend(way[1]):
        classification, localisation = alrp_loss(logits, TARGETS, boxes, delta=0, method=way[0])
        torch.testing.assert_close(classification.item(), (0 + 1 / 3) / 2)
        torch.testing.assert_close(localisation.item(), (0.2 / 1 + (0.2 + 0.6) / 3) / 2)
        # 1 is pushed by the negative above it and by the error 0.2 above it: (0.2 + 1) / 3, halved.
        torch.testing.assert_close(_gradient(classification, logits), [0.0, 0.2, -0.2, 0.0])
        torch.testing.assert_close(_gradient(localisation, logits), [0.0] * 4)
        torch.testing.assert_close(_gradient(localisation, boxes), [(1 + 1 / 3) / 2, 1 / 6])
        # In the order of the logits, not of the ranking.
        flipped = alrp_loss(LOGITS.flip(0), TARGETS.flip(0), boxes.detach().flip(0), delta=0, method=way[0])
        torch.testing.assert_close(flipped.localisation, localisation.detach())


def test_dr() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0], requires_grad=True)
    targets = torch.tensor([1.0, 1.0, 0.0, -1.0])
    p = [1 / (1 + math.exp(-s)) for s in (0.0, 2.0, -1.0)]
    weights = [math.exp(-p[0]), math.exp(-p[1])]
    lowest = (weights[0] * p[0] + weights[1] * p[1]) / sum(weights)
    expected = 4 * math.log(1 + math.exp(6 * (p[2] - lowest + 0.5))) / 6
    loss = dr_loss(logits, targets)
    torch.testing.assert_close(loss.item(), expected)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[2] > 0 > logits.grad[0]
    assert logits.grad[3] == 0


def test_dr_takes_the_hardest_negative_as_its_temperature_falls() -> None:
    logits, targets = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1.0, 0.0, 0.0])
    loss = dr_loss(logits, targets, negative_temperature=1e-4, smoothing=100.0, weight=1.0, margin=0.5)
    torch.testing.assert_close(loss, torch.sigmoid(logits[2]) - torch.sigmoid(logits[0]) + 0.5, atol=1e-4, rtol=0)
