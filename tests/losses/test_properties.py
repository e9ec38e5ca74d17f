"""What holds for every input: properties of the ranking losses, on inputs that hypothesis makes up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bucketrank import rank_sort_loss

from .cases import DELTAS, EVERY, LOSSES, RANKING, Way, answer, assert_same, total, triples, use_backend

losses, ranking_losses = st.sampled_from(triples()), st.sampled_from(triples(RANKING))
ways, deltas = st.sampled_from(EVERY), st.sampled_from(DELTAS)


@st.composite
def inputs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Logits on a coarse grid or anywhere, so that ties and edges are met; few labels, so that they tie too."""
    size = draw(st.integers(1, 40))
    grid = st.integers(-12, 12).map(lambda step: step / 4)
    anywhere = st.floats(-100, 100, width=32)
    logits = draw(st.lists(st.one_of(grid, anywhere), min_size=size, max_size=size))
    labels = st.sampled_from([-1.0, 0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0])
    targets = draw(st.lists(labels, min_size=size, max_size=size))
    # Shifts and permutations are exact in float64, so the properties can be held to it.
    return torch.tensor(logits, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64)


@given(inputs(), st.sampled_from(triples(skip=["bucketed"])))
def test_the_definition(data: tuple[Tensor, Tensor], triple: tuple[str, float, Way]) -> None:
    name, delta, way = triple
    if not (data[1] > 0).any():
        return
    expected = LOSSES[name].oracle(*data, delta)
    assert_same(answer(LOSSES[name].compute, *data, delta=delta, way=way), expected, relative=1e-9)


@given(inputs(), losses, st.randoms(use_true_random=False))
def test_order_does_not_matter(data, triple, random) -> None:
    name, delta, way = triple
    logits, targets = data
    order = list(range(logits.numel()))
    random.shuffle(order)
    loss = LOSSES[name].compute
    expected = answer(loss, logits, targets, delta=delta, way=way)
    shuffled = [gradient[order] for gradient in expected.gradients]
    got = answer(loss, logits[order], targets[order], delta=delta, way=way)
    assert_same(got, expected._replace(gradients=shuffled), relative=1e-9)


@given(inputs(), ranking_losses, st.sampled_from([-64.0, -0.5, 16.0, 1024.0]))
def test_only_differences_matter(data, triple, shift) -> None:
    name, delta, way = triple
    # Multiples of 1/1024 of moderate size are shifted without rounding.
    logits = (data[0] * 1024).round() / 1024
    loss = LOSSES[name].compute
    expected = answer(loss, logits, data[1], delta=delta, way=way)
    # Rounding of 1024 +- 0.1 in float64 shows in the comparisons at 1e-12 / delta.
    assert_same(answer(loss, logits + shift, data[1], delta=delta, way=way), expected, relative=1e-8)


@given(inputs(), ranking_losses)
def test_gradients_sum_to_zero(data, triple) -> None:
    name, delta, way = triple
    for gradient in answer(LOSSES[name].compute, *data, delta=delta, way=way).gradients:
        torch.testing.assert_close(gradient.sum().item(), 0.0, atol=1e-9, rtol=0)


@given(inputs(), ranking_losses)
def test_signs(data, triple) -> None:
    """Negatives are pushed down, positives lifted by the ranking term; the values are errors, between 0 and 1."""
    name, delta, way = triple
    got = answer(LOSSES[name].compute, *data, delta=delta, way=way)
    assert all(-1e-12 <= value <= 1 + 1e-12 for value in got.values)
    assert (got.gradients[0][data[1] == 0] >= 0).all()
    assert (got.gradients[0][data[1] > 0] <= 0).all()


@given(inputs(), ranking_losses, st.integers(1, 5))
def test_far_negatives_are_free(data, triple, many) -> None:
    name, delta, way = triple
    logits, targets = data
    far = logits.new_full((many,), logits.min().item() - 2 * delta - 1)
    loss = LOSSES[name].compute
    expected = answer(loss, logits, targets, delta=delta, way=way)
    got = answer(loss, torch.cat([logits, far]), torch.cat([targets, targets.new_zeros(many)]), delta=delta, way=way)
    padded = [torch.cat([gradient, gradient.new_zeros(many)]) for gradient in expected.gradients]
    assert_same(got, expected._replace(gradients=padded), relative=1e-9)


@given(inputs(), losses)
def test_ignored_entries_change_nothing_and_get_nothing(data, triple) -> None:
    name, delta, way = triple
    logits, targets = data
    kept = targets >= 0
    loss = LOSSES[name].compute
    got = answer(loss, logits, targets, delta=delta, way=way)
    assert all((gradient[~kept] == 0).all() for gradient in got.gradients)
    alone = answer(loss, logits[kept], targets[kept], delta=delta, way=way)
    assert_same(got._replace(gradients=[gradient[kept] for gradient in got.gradients]), alone, relative=1e-9)


@given(inputs(), deltas, ways, st.floats(0, 8), st.floats(0, 8))
def test_a_weight_scales_its_own_term_alone(data, delta, way, ranking_weight, sorting_weight) -> None:
    apart = answer(LOSSES["rank_sort"].compute, *data, delta=delta, way=way)
    leaf = data[0].clone().requires_grad_()
    with use_backend(way[1]):
        ranking, sorting = rank_sort_loss(leaf, data[1], delta=delta, method=way[0])
        (ranking_weight * ranking + sorting_weight * sorting).backward()
    expected = ranking_weight * apart.gradients[0] + sorting_weight * apart.gradients[1]
    torch.testing.assert_close(leaf.grad, expected, atol=1e-12, rtol=1e-9)


def test_the_published_mistake_is_not_repeated() -> None:
    """``ranking + 3 * sorting`` trains with three times the sorting gradient; the published code ignores the 3."""
    logits, targets = torch.tensor([3.0, 2.0, 1.0], requires_grad=True), torch.tensor([0.5, 0.0, 0.9])
    ranking, sorting = rank_sort_loss(logits, targets, delta=0)
    (ranking + 3 * sorting).backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.tolist(), [3 * 0.1, 1 / 6, -1 / 6 - 3 * 0.1])


@pytest.mark.parametrize("way", EVERY, ids="-".join)
def test_the_terms_fall_when_trained(way: Way) -> None:
    """The gradient is defined, not derived; all the same, following it sorts the list."""
    torch.manual_seed(0)
    logits = torch.randn(60, requires_grad=True)
    targets = torch.where(torch.arange(60) < 12, torch.linspace(0.05, 1, 60), 0.0)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    with use_backend(way[1]):
        for _ in range(200):
            optimizer.zero_grad()
            total(rank_sort_loss(logits, targets, method=way[0])).backward()
            optimizer.step()
    best = logits.detach().argsort(descending=True)[:12].tolist()
    assert best == list(range(11, -1, -1))
