"""Retrieval AP loss against its definition: one ranking per query, each computed by the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bucketrank import retrieval
from bucketrank.retrieval import SIMILARITIES, RetrievalAPLoss, retrieval_ap_loss

from .losses import oracle


def _definition(queries: Tensor, labels: Tensor, references: Tensor, classes: Tensor, *, itself: bool, **settings: Any):
    """Return the loss, and the gradient at queries and references, from the oracle's gradient at the similarities."""
    leaves = [part.double().clone().requires_grad_() for part in (queries, references)]
    if settings["similarity"] == "cosine":
        scores = nn.functional.normalize(leaves[0], dim=1) @ nn.functional.normalize(leaves[1], dim=1).T
    elif settings["similarity"] == "dot":
        scores = leaves[0] @ leaves[1].T
    else:
        scores = -(leaves[0][:, None] - leaves[1]).norm(dim=2)
    losses, upstream = [], torch.zeros_like(scores)
    for query in range(len(queries)):
        targets = (classes == labels[query]).double()
        if itself:
            targets[query] = -1
        if not (targets > 0).any():
            continue
        answer = oracle.ap(scores[query].detach(), targets, settings["delta"])
        losses.append(answer.values[0])
        upstream[query] = answer.gradients[0]
    return torch.stack(losses).mean(), torch.autograd.grad(scores, leaves, upstream / len(losses))


def _batch(size: int, classes: int, *, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Unequal class sizes; the last class has one member, which has no match.
    labels = (torch.rand(size, generator=generator) ** 2 * classes).long()
    labels[-1] = classes
    return torch.randn(size, 8, generator=generator, dtype=torch.float64), labels


@pytest.mark.parametrize("chunk", [1, 70, 1 << 22])
@pytest.mark.parametrize("delta", [0.0, 0.3])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_equals_the_definition(similarity: Any, delta: float, chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(retrieval, "CHUNK", chunk)
    settings = {"similarity": similarity, "delta": delta}
    embeddings, labels = _batch(30, 4, seed=0)
    leaf = embeddings.clone().requires_grad_()
    loss = retrieval_ap_loss(leaf, labels, **settings)
    (gradient,) = torch.autograd.grad(loss, leaf)
    expected, parts = _definition(embeddings, labels, embeddings, labels, itself=True, **settings)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, parts[0] + parts[1], rtol=1e-7, atol=1e-9)

    references, classes = _batch(50, 4, seed=1)
    leaves = [embeddings.clone().requires_grad_(), references.clone().requires_grad_()]
    loss = retrieval_ap_loss(leaves[0], labels, ref_embeddings=leaves[1], ref_labels=classes, **settings)
    expected, parts = _definition(embeddings, labels, references, classes, itself=False, **settings)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), parts, rtol=1e-7, atol=1e-9)


def test_separated_classes_have_no_loss() -> None:
    # 32 classes x 4: pytorch-metric-learning's SmoothAP gives 0.61 here.
    labels = torch.arange(32).repeat_interleave(4)
    assert retrieval_ap_loss(torch.eye(32)[labels], labels) == 0


def test_no_match_is_zero_and_attached() -> None:
    embeddings = torch.randn(3, 5, requires_grad=True)
    loss = retrieval_ap_loss(embeddings, torch.arange(3))
    loss.backward()
    assert loss == 0
    assert embeddings.grad is not None
    assert not embeddings.grad.any()
    assert retrieval_ap_loss(torch.empty(0, 5), torch.empty(0, dtype=torch.long)) == 0


def test_trains_embeddings() -> None:
    torch.manual_seed(0)
    labels = torch.arange(60) % 6
    inputs = torch.randn(6, 10)[labels] + torch.randn(60, 10)
    layer = nn.Linear(10, 12)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.05)
    loss_function = RetrievalAPLoss()
    values = []
    for _ in range(60):
        loss = loss_function(layer(inputs), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        values.append(loss.item())
    assert values[-1] < 0.6 * values[0]


def test_half_precision() -> None:
    embeddings, labels = _batch(20, 3, seed=2)
    leaf = embeddings.bfloat16().requires_grad_()
    retrieval_ap_loss(leaf, labels).backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.bfloat16
    assert leaf.grad.isfinite().all()


def test_the_module_has_the_interface_of_pytorch_metric_learning() -> None:
    embeddings, labels = _batch(20, 3, seed=3)
    references, classes = _batch(30, 3, seed=4)
    module = RetrievalAPLoss(delta=0.4, similarity="dot")
    assert torch.equal(module(embeddings, labels), retrieval_ap_loss(embeddings, labels, delta=0.4, similarity="dot"))
    expected = retrieval_ap_loss(
        embeddings, labels, ref_embeddings=references, ref_labels=classes, delta=0.4, similarity="dot"
    )
    assert torch.equal(module(embeddings, labels, None, references, classes), expected)
    assert repr(module) == "RetrievalAPLoss(delta=0.4, similarity='dot')"
    with pytest.raises(ValueError, match="use it without a miner"):
        module(embeddings, labels, (1, 2, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": -1.0}, "expected delta"),
        ({"similarity": "l1"}, "expected similarity to be one of cosine, dot, euclidean, got 'l1'"),
        ({"labels": torch.zeros(3)}, r"expected labels of shape \(4,\)"),
        ({"embeddings": torch.zeros(4)}, r"expected embeddings of shape \(B, D\)"),
        ({"ref_labels": torch.zeros(4)}, "got no ref_embeddings"),
        ({"ref_embeddings": torch.zeros(4, 3), "ref_labels": torch.zeros(4)}, "2 columns like embeddings, got 3"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"embeddings": torch.zeros(4, 2), "labels": torch.zeros(4), **change}
    with pytest.raises(ValueError, match=message):
        retrieval_ap_loss(**arguments)
