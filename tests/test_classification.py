"""Multi-label AP loss against the float64 oracle, the score memory, and probabilities from scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bucketrank import ap_loss
from bucketrank.classification import MultilabelAPLoss, ScoreMemory, fit_score_map, multilabel_ap_loss
from bucketrank.errors import CannotCalibrateError

from .losses import oracle


def _batch(size: int = 40, classes: int = 5, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and targets with ignored entries; the last class has no positive."""
    generator = torch.Generator().manual_seed(seed)
    targets = (torch.rand(size, classes, generator=generator) < 0.2).double()
    targets[:, -1] = 0
    targets[torch.rand(size, classes, generator=generator) < 0.1] = -1
    return torch.randn(size, classes, generator=generator, dtype=torch.float64), targets


@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_every_class_is_a_ranking(delta: float) -> None:
    logits, targets = _batch()
    leaf = logits.clone().requires_grad_()
    each = multilabel_ap_loss(leaf, targets, delta=delta, reduction="none")
    (gradient,) = torch.autograd.grad(each.sum(), leaf)
    answers = [oracle.ap(logits[:, k], targets[:, k], delta) for k in range(5)]
    torch.testing.assert_close(each, torch.stack([answer.values[0] for answer in answers]))
    torch.testing.assert_close(gradient, torch.stack([answer.gradients[0] for answer in answers], 1))
    assert each[-1] == 0
    torch.testing.assert_close(multilabel_ap_loss(logits, targets, delta=delta), each[:-1].mean())


def test_a_binary_classifier_has_one_ranking() -> None:
    logits, targets = (column[:, 0] for column in _batch())
    assert torch.equal(multilabel_ap_loss(logits, targets), ap_loss(logits, targets))


def test_memory_joins_the_ranking_without_a_gradient() -> None:
    first, second = _batch(12, seed=1), _batch(12, seed=2)
    memory = ScoreMemory(20, 5).double()
    early = first[0].clone().requires_grad_()
    assert torch.equal(multilabel_ap_loss(early, first[1], memory=memory), multilabel_ap_loss(*first))
    leaf = second[0].clone().requires_grad_()
    loss = multilabel_ap_loss(leaf, second[1], memory=memory)
    loss.backward()
    assert early.grad is None
    both = torch.cat([second[0], first[0]]).requires_grad_()
    expected = multilabel_ap_loss(both, torch.cat([second[1], first[1]]))
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert both.grad is not None
    torch.testing.assert_close(leaf.grad, both.grad[:12])


@pytest.mark.parametrize("size", [1, 7, 10, 64])
def test_memory_keeps_the_last_samples(size: int) -> None:
    memory = ScoreMemory(size, 2)
    samples = torch.arange(50.0).view(25, 2)
    for batch in samples.split([3, 4, 1, 12, 5]):
        memory.push(batch, (batch > 20).float())
    kept = memory.targets[:, 0] >= 0
    assert sorted(memory.logits[kept][:, 0].tolist()) == samples[-size:][:, 0].tolist()
    assert torch.equal(memory.targets[kept], (memory.logits[kept] > 20).float())


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1e300])
def test_memory_ignores_what_is_not_finite(wrong: float) -> None:
    logits, targets = _batch()
    loss = MultilabelAPLoss(5, memory_size=64)
    broken, stored = logits.clone(), targets.clone()
    broken[2, 3], targets[2, 3], stored[2, 3] = wrong, 1, -1
    loss(broken, targets)
    assert loss.memory is not None
    assert torch.equal(loss.memory.targets[: len(stored)], stored.float())
    assert loss(logits, targets).isfinite()


def test_a_resumed_run_continues_with_the_same_memory() -> None:
    def module() -> MultilabelAPLoss:
        return MultilabelAPLoss(5, memory_size=30).double()

    through, before, after = module(), module(), module()
    batches = [_batch(12, seed=seed) for seed in range(6)]
    expected = [through(*batch) for batch in batches]
    got = [before(*batch) for batch in batches[:3]]
    after.load_state_dict(before.state_dict())
    assert got + [after(*batch) for batch in batches[3:]] == expected
    after.eval()
    assert after(*batches[0]) == multilabel_ap_loss(*batches[0])
    assert repr(module().memory) == "ScoreMemory(size=30, classes=5)"


def test_scores_become_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(4000, 2, generator=generator) + torch.tensor([3.0, -2.0])
    chances = torch.stack([(0.4 * logits[:, 0] - 1).sigmoid(), (0.2 * logits[:, 1] + 0.5).sigmoid()], 1)
    targets = (torch.rand(4000, 2, generator=generator) < chances).float()
    targets[:100] = -1
    fitted = fit_score_map(logits, targets)
    np.testing.assert_allclose(fitted.a, [0.4, 0.2], rtol=0.1)
    np.testing.assert_allclose(fitted.b, [-1, 0.5], atol=0.15)


@pytest.mark.parametrize("shape", [(0, 3), (0,), (5,)])
def test_too_few_samples_for_probabilities(shape: tuple[int, ...]) -> None:
    with pytest.raises(CannotCalibrateError, match=r"at least 10 detections that are right .* got 0 and"):
        fit_score_map(torch.zeros(shape), torch.zeros(shape))


def test_errors() -> None:
    logits, targets = _batch()
    with pytest.raises(ValueError, match=r"expected logits of shape \(B, C\) or \(B,\), got \(2, 20, 5\)"):
        multilabel_ap_loss(logits.view(2, 20, 5), targets.view(2, 20, 5))
    with pytest.raises(ValueError, match="expected a memory of 5 classes like logits, got 3"):
        multilabel_ap_loss(logits, targets, memory=ScoreMemory(4, 3))
    with pytest.raises(ValueError, match="ScoreMemory: expected size to be an integer above 0, got 0"):
        ScoreMemory(0, 3)
    with pytest.raises(ValueError, match="multilabel_ap_loss: expected delta"):
        multilabel_ap_loss(logits, targets, delta=-1)
