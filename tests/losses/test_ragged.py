"""Many rankings in torch operations: groups of small rankings and large ones alone, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bucketrank import alrp_loss
from bucketrank.losses import ragged, rankings

from . import oracle
from .cases import LOSSES, RANKING, assert_same, localisation_errors, synthetic, use_backend

SIZES = {
    "one": [1],
    "empty": [0, 0],
    "few": [0, 1, 2, 3, 0, 50, 1],
    "equal": [16] * 60,
    "large between small": [5, 300, 1, 7, 200, 0, 250],
    "thousands": [3] * 2000,
}


def _rankings(sizes: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Rankings with ties, equal labels and ignored entries, of which some have no positive."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.rand(sum(sizes), generator=generator) for _ in range(3)]
    logits = torch.where(draw[0] < 0.3, (draw[1] * 8).round() / 8, draw[1] * 3 - 1).to(dtype)
    targets = torch.where(draw[2] < 0.3, (draw[2] * 20).ceil() / 8, 0.0).to(dtype)
    return logits, targets.masked_fill(draw[2] > 0.9, -1)


def _answer(name: str, logits: Tensor, targets: Tensor, **settings: Any) -> oracle.Answer:
    leaf = logits.clone().requires_grad_()
    with use_backend("torch"):
        terms = LOSSES[name].compute(leaf, targets, reduction="none", **settings)
        gradients = [torch.autograd.grad(term.sum(), leaf, retain_graph=True)[0] for term in terms]
    return oracle.Answer([term.detach() for term in terms], gradients)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close a group after 300 pairs, and bucket rankings of more than 2000."""
    monkeypatch.setattr(ragged, "PAIRS_PER_GROUP", 300)
    for module in (ragged, rankings):
        monkeypatch.setattr(module, "MAX_PAIRS", 2000)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("name", RANKING)
@pytest.mark.parametrize("delta", [0.0, 0.3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_equals_the_definition(sizes: list[int], delta: float, name: str) -> None:
    logits, targets = _rankings(sizes)
    got = _answer(name, logits, targets, delta=delta, sizes=sizes)
    # The oracle is slow: of the thousands, the first hundred and the last.
    chosen = [*range(min(len(sizes), 100)), len(sizes) - 1]
    parts = [*zip(logits.split(sizes), targets.split(sizes), strict=True)]
    each = [LOSSES[name].oracle(parts[k][0], parts[k][1], delta) for k in chosen]
    values = [
        torch.stack([torch.as_tensor(x) for x in value]) for value in zip(*(one.values for one in each), strict=True)
    ]
    gradients = [torch.cat(part) for part in zip(*(one.gradients for one in each), strict=True)]
    ours = oracle.Answer(
        [value[chosen] for value in got.values],
        [torch.cat([part.split(sizes)[k] for k in chosen]) for part in got.gradients],
    )
    assert_same(ours, oracle.Answer(values, gradients), relative=1e-9)


@pytest.mark.parametrize("name", RANKING)
def test_a_ranking_does_not_depend_on_its_group(name: str) -> None:
    sizes = [12, 3, 40, 1, 7, 0, 25]
    logits, targets = _rankings(sizes, torch.float32)
    together = _answer(name, logits, targets, delta=0.5, sizes=sizes)
    for k, part in enumerate(zip(logits.split(sizes), targets.split(sizes), strict=True)):
        alone = _answer(name, *part, delta=0.5, sizes=[sizes[k]])
        for ours, theirs in zip(alone.values, together.values, strict=True):
            assert torch.equal(ours, theirs[[k]])
        for ours, theirs in zip(alone.gradients, together.gradients, strict=True):
            assert torch.equal(ours, theirs.split(sizes)[k])


@pytest.mark.usefixtures("small_groups")
def test_groups_cover_every_ranking_once() -> None:
    assert list(ragged.groups([], [])) == []
    assert list(ragged.groups([0], [0])) == [(0, 1)]
    # 100, 100, 100 pairs; then 50, then 2001 alone, then 100 and 250.
    sizes, counts = [100, 100, 100, 50, 2001, 100, 125], [1, 1, 1, 1, 1, 1, 2]
    assert list(ragged.groups(sizes, counts)) == [(0, 3), (3, 4), (4, 5), (5, 6), (6, 7)]


def test_localisation_errors_follow_their_rankings() -> None:
    logits, targets = synthetic(90, 30)
    logits[targets[:30].argmin()] = torch.inf
    errors = localisation_errors(targets).requires_grad_()
    with use_backend("torch"):
        terms = alrp_loss(logits, targets, errors, sizes=[30, 0, 60], reduction="none")
        terms.localisation.sum().backward()
        expected = alrp_loss(logits[30:], targets[30:], errors[int((targets[:30] > 0).sum()) :].detach())
    assert terms.localisation.isnan().tolist() == [True, False, False]
    torch.testing.assert_close(terms.localisation[2], expected.localisation)
    assert errors.grad is not None
    positives = int((targets[:30] > 0).sum())
    assert errors.grad.isnan().tolist() == [True] * positives + [False] * (30 - positives)
