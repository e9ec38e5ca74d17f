"""Many rankings in one call, and the capacity for positives: the same on every method and backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bucketrank import ALRPLoss, APLoss, RankSortLoss, alrp_loss, ap_loss, rank_sort_loss

from .cases import (
    EVERY,
    LOSSES,
    RANKING,
    Way,
    hard_inputs,
    identify,
    localisation_errors,
    pairs,
    synthetic,
    total,
    use_backend,
)

every_ranking_loss = pytest.mark.parametrize(("name", "way"), pairs(RANKING), ids=identify)
every_way = pytest.mark.parametrize("way", EVERY, ids="-".join)


def _rankings() -> tuple[Tensor, Tensor, list[int]]:
    """Several rankings: some hard, one empty, one without positives, one alone with a positive."""
    hard = hard_inputs()
    parts = [hard[name] for name in ("plain", "ties and equal labels", "offset 1e4", "one positive alone")]
    parts += [(torch.empty(0), torch.empty(0)), (torch.randn(7), torch.zeros(7)), hard["no negatives"]]
    logits, targets = (torch.cat(column).double() for column in zip(*parts, strict=True))
    return logits, targets, [len(logits) for logits, _ in parts]


def _run(name: str, way: Way, logits: Tensor, targets: Tensor, weights: Tensor, **settings: Any) -> list[Tensor]:
    """Return the values and the gradient at the logits of a weighted sum of all values."""
    leaf = logits.clone().requires_grad_()
    with use_backend(way[1]):
        terms = LOSSES[name].compute(leaf, targets, method=way[0], **settings)
        total((factor * weights * term).sum() for factor, term in zip((1.0, 3.0), terms, strict=False)).backward()
    assert leaf.grad is not None
    return [*(term.detach() for term in terms), leaf.grad]


@pytest.mark.sampled(5)
@every_ranking_loss
@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_equals_a_loop_over_the_rankings(delta: float, name: str, way: Way) -> None:
    logits, targets, sizes = _rankings()
    weights = torch.linspace(0.5, 2, len(sizes), dtype=torch.float64)
    got = _run(name, way, logits, targets, weights, sizes=sizes, reduction="none", delta=delta)
    apart = [
        _run(name, way, *part, delta=delta)
        for part in zip(logits.split(sizes), targets.split(sizes), weights, strict=True)
    ]
    *values, gradients = zip(*apart, strict=True)
    for ours, theirs in zip(got, [*map(torch.stack, values), torch.cat(gradients)], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)
    again = _run(name, way, logits, targets, weights, sizes=sizes, reduction="none", delta=delta)
    assert all(map(torch.equal, got, again))


@every_ranking_loss
def test_the_mean_is_over_the_rankings_that_have_positives(name: str, way: Way) -> None:
    logits, targets, sizes = _rankings()
    one = torch.ones((), dtype=torch.float64)
    *values, _ = _run(name, way, logits, targets, one, sizes=sizes, reduction="none")
    *means, gradient = _run(name, way, logits, targets, one, sizes=tuple(sizes))
    torch.testing.assert_close(means, [value.sum() / 5 for value in values])  # of 7 rankings 2 have no positive
    *_, summed = _run(name, way, logits, targets, one, sizes=sizes, reduction="none")
    torch.testing.assert_close(gradient, summed / 5)


@every_ranking_loss
def test_rankings_of_equal_size(name: str, way: Way) -> None:
    logits, targets = synthetic(300, 40)
    *means, _ = _run(name, way, logits, targets, torch.ones(()), sizes=[100] * 3)
    *values, _ = _run(name, way, logits, targets, torch.ones(()), sizes=[100] * 3, reduction="none")
    torch.testing.assert_close(means, [value.mean() for value in values])


@every_ranking_loss
@pytest.mark.parametrize("sizes", [[3, 3], [0], []], ids=["no positives", "one empty", "no ranking"])
def test_nothing_to_rank_is_zero_and_attached(sizes: list[int], name: str, way: Way) -> None:
    logits = torch.randn(sum(sizes), requires_grad=True)
    with use_backend(way[1]):
        terms = LOSSES[name].compute(logits, torch.zeros(sum(sizes)), method=way[0], sizes=sizes)
        each = LOSSES[name].compute(logits, torch.zeros(sum(sizes)), method=way[0], sizes=sizes, reduction="none")
        total(terms).backward()
    assert [term.item() for term in terms] == [0.0] * len(terms)
    assert [term.tolist() for term in each] == [[0.0] * len(sizes)] * len(terms)
    assert logits.grad is not None
    assert not logits.grad.any()


@every_ranking_loss
def test_input_that_is_not_finite_spoils_its_own_ranking_only(name: str, way: Way) -> None:
    logits, targets = synthetic(60, 20)
    targets[[2, 31]] = -1
    logits[[2, 40]] = torch.nan  # the first is ignored
    targets[40] = 0
    *values, gradient = _run(name, way, logits, targets, torch.ones(()), sizes=[30, 30], reduction="none")
    assert all(value.isnan().tolist() == [False, True] for value in values)
    assert gradient[:30].isfinite().all()
    assert gradient[30:].isnan().tolist() == [position != 31 for position in range(30, 60)]
    assert gradient[31] == 0


@every_ranking_loss
@pytest.mark.parametrize("sizes", [None, [20, 40]], ids=["one", "two"])
def test_more_positives_than_the_capacity_give_nan(sizes: list[int] | None, name: str, way: Way) -> None:
    logits, targets = synthetic(60, 12)
    targets[5] = -1
    positives = int((targets > 0).sum())
    one = torch.ones(())
    free = _run(name, way, logits, targets, one, sizes=sizes)
    full = _run(name, way, logits, targets, one, sizes=sizes, max_positives=positives)
    assert all(map(torch.equal, full, free))
    *values, gradient = _run(name, way, logits, targets, one, sizes=sizes, max_positives=positives - 1)
    assert all(value.isnan() for value in values)
    assert gradient.isnan().tolist() == [position != 5 for position in range(60)]


@pytest.mark.sampled(5)
@every_way
@pytest.mark.parametrize("max_positives", [None, 8])
def test_compiles_as_one_graph(max_positives: int | None, way: Way) -> None:
    method, backend = way

    def train(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        each = rank_sort_loss(
            logits * 2, targets, method=method, sizes=(100, 50, 150), reduction="none", max_positives=max_positives
        )
        mean = ap_loss(logits, targets, method=method, sizes=[100, 50, 150], max_positives=max_positives)
        return each.ranking, (each.ranking + 3 * each.sorting).sum() + mean

    logits, targets = synthetic(300, 9)
    answers = []
    with use_backend(backend):
        for run in (train, torch.compile(train, fullgraph=True, backend="aot_eager")):
            leaf = logits.clone().requires_grad_()
            values, loss = run(leaf, targets)
            loss.backward()
            answers.append((values.detach(), loss.detach(), leaf.grad))
    assert answers[0][1].isnan() == (max_positives == 8)
    torch.testing.assert_close(answers[1], answers[0], equal_nan=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", LOSSES["alrp"].ways, ids="-".join)
def test_localisation_errors_cover_all_rankings_in_order(way: Way, compiled: bool) -> None:
    logits, targets, sizes = _rankings()
    errors = localisation_errors(targets)
    run = torch.compile(alrp_loss, fullgraph=True, backend="aot_eager") if compiled else alrp_loss
    with use_backend(way[1]):
        ours, leaf = errors.clone().requires_grad_(), logits.clone().requires_grad_()
        terms = run(leaf, targets, ours, method=way[0], sizes=sizes, reduction="none")
        (terms.classification + terms.localisation).sum().backward()
        counts = [int((part > 0).sum()) for part in targets.split(sizes)]
        theirs = errors.clone().requires_grad_()
        for part in zip(logits.split(sizes), targets.split(sizes), theirs.split(counts), strict=True):
            alrp_loss(*part, method=way[0]).localisation.backward()
        with pytest.raises(ValueError, match=r"expected one localisation error for each .* got 3"):
            alrp_loss(logits, targets, errors[:3], sizes=sizes)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_modules_take_sizes() -> None:
    logits, targets = synthetic(100, 20)
    settings: dict[str, Any] = {"reduction": "none", "max_positives": 30}
    call: dict[str, Any] = {"sizes": [40, 60], **settings}
    assert torch.equal(APLoss(**settings)(logits, targets, sizes=[40, 60]), ap_loss(logits, targets, **call))
    ranking, sorting = rank_sort_loss(logits, targets, **call)
    assert torch.equal(RankSortLoss(**settings)(logits, targets, sizes=[40, 60]), ranking + sorting)
    errors = localisation_errors(targets)
    classification, boxes = alrp_loss(logits, targets, errors, **call)
    assert torch.equal(ALRPLoss(**settings)(logits, targets, errors, sizes=[40, 60]), classification + boxes)
    assert repr(RankSortLoss(**settings)) == (
        "RankSortLoss(delta=0.5, method='exact', reduction='none', max_positives=30)"
    )


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"sizes": [3, -1, 4]}, ValueError, r"expected sizes of at least 0, got \[3, -1, 4\]"),
        ({"sizes": [3, 4]}, ValueError, r"sum is the number of logits, 6, got \[3, 4\], whose sum is 7"),
        ({"sizes": [3.0, 3.0]}, TypeError, r"expected sizes to be a list or tuple of integers, .* got \[3.0, 3.0\]"),
        ({"sizes": torch.tensor([3, 3])}, TypeError, "expected sizes to be a list or tuple of integers"),
        ({"sizes": 3}, TypeError, "expected sizes to be a list or tuple of integers"),
        ({"reduction": "sum"}, ValueError, "expected reduction to be one of mean, none, got 'sum'"),
        ({"max_positives": 0}, ValueError, "expected max_positives to be None or an integer above 0, got 0"),
        ({"max_positives": 2.0}, ValueError, "expected max_positives to be None or an integer above 0, got 2.0"),
    ],
)
def test_errors(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    logits = torch.zeros(6)
    for loss in (ap_loss, rank_sort_loss):
        with pytest.raises(error, match=f"{loss.__name__}: .*{message}"):
            loss(logits, logits, **settings)
    with pytest.raises(error, match=f"alrp_loss: .*{message}"):
        alrp_loss(logits, logits, torch.zeros(0), **settings)
