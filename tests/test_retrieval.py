"""Retrieval AP loss against its definition: one ranking per query, each computed by the float64 oracle."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

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


@pytest.mark.sampled(5)
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


def test_autocast_does_not_round_the_similarities() -> None:
    embeddings, labels = _batch(20, 3, seed=2)
    results = []
    for enabled in (False, True):
        leaf = embeddings.float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = retrieval_ap_loss(leaf, labels)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    assert_close(results[1], results[0], rtol=0, atol=0)


def test_the_module_has_the_interface_of_pytorch_metric_learning() -> None:
    embeddings, labels = _batch(20, 3, seed=3)
    references, classes = _batch(30, 3, seed=4)
    module = RetrievalAPLoss(delta=0.4, similarity="dot")
    assert torch.equal(module(embeddings, labels), retrieval_ap_loss(embeddings, labels, delta=0.4, similarity="dot"))
    expected = retrieval_ap_loss(
        embeddings, labels, ref_embeddings=references, ref_labels=classes, delta=0.4, similarity="dot"
    )
    assert torch.equal(module(embeddings, labels, None, references, classes), expected)
    assert module.extra_repr() == "delta=0.4, similarity='dot'"
    with pytest.raises(ValueError, match="RetrievalAPLoss: expected similarity to be one of cosine, dot"):
        RetrievalAPLoss(similarity="cos")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected no distance, got one; use similarity"):
        RetrievalAPLoss(distance="cosine")
    with pytest.raises(ValueError, match=r"4 index tensors .* got 2 of lengths 1, 1"):
        module(embeddings, labels, (torch.tensor([1]), torch.tensor([2])))


@pytest.mark.parametrize("chunk", [70, 1 << 22])
def test_pairs_limit_the_rankings(chunk: int, monkeypatch) -> None:
    """All pairs give the loss of all, and a ranking without an entry is that of the others."""
    monkeypatch.setattr(retrieval, "CHUNK", chunk)
    embeddings, labels = _batch(20, 3, seed=5)
    same = labels[:, None] == labels
    other = ~torch.eye(20, dtype=torch.bool)
    everything = (*(same & other).nonzero().T, *(~same).nonzero().T)
    torch.testing.assert_close(
        retrieval_ap_loss(embeddings, labels, pairs=everything), retrieval_ap_loss(embeddings, labels)
    )
    kept = torch.tensor([[True] * 15 + [False] * 5] * 20)
    fewer = (*(same & other & kept).nonzero().T, *(~same & kept).nonzero().T)
    expected = [
        retrieval_ap_loss(
            embeddings[[query]],
            labels[[query]],
            ref_embeddings=embeddings[:15][other[query, :15]],
            ref_labels=labels[:15][other[query, :15]],
        )
        for query in range(20)
        if (same & other & kept)[query].any()
    ]
    torch.testing.assert_close(retrieval_ap_loss(embeddings, labels, pairs=fewer), torch.stack(expected).mean())


def test_triplets_are_pairs_of_one_query() -> None:
    embeddings, labels = _batch(20, 3, seed=6)
    query, match, others = (torch.tensor(part) for part in ([0, 0, 3], [1, 2, 4], [5, 6, 7]))
    torch.testing.assert_close(
        retrieval_ap_loss(embeddings, labels, pairs=(query, match, others)),
        retrieval_ap_loss(embeddings, labels, pairs=(query, match, query, others)),
    )


def _with_library(monkeypatch, library: Any) -> Any:
    """Execute the module anew beside this package ``pytorch_metric_learning.losses``."""
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", ModuleType("pytorch_metric_learning"))
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning.losses", library)
    spec = importlib.util.spec_from_file_location("bucketrank.retrieval_anew", retrieval.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_beside_pytorch_metric_learning_it_is_one_of_its_losses(monkeypatch) -> None:
    class Base(nn.Module):
        """The library's protocol: forward calls compute_loss, with the embeddings as references by default."""

        def __init__(self, reducer: str = "mean") -> None:
            super().__init__()
            self.reducer = reducer

        def forward(self, embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
            others = (embeddings, labels) if ref_emb is None else (ref_emb, ref_labels)
            (loss,) = self.compute_loss(embeddings, labels, indices_tuple, *others).values()  # type: ignore[operator]
            assert loss["reduction_type"] == "already_reduced"
            return loss["losses"]

    library = ModuleType("pytorch_metric_learning.losses")
    library.BaseMetricLossFunction = Base  # type: ignore[attr-defined]
    loss_function = _with_library(monkeypatch, library).RetrievalAPLoss(delta=0.1, reducer="own")
    assert isinstance(loss_function, Base)
    assert loss_function.reducer == "own"
    embeddings, labels = _batch(20, 3, seed=7)
    torch.testing.assert_close(loss_function(embeddings, labels), retrieval_ap_loss(embeddings, labels, delta=0.1))


def test_with_the_library_itself() -> None:
    """Its miners, its regularisers and its memory of earlier batches, which must be told to take this loss."""
    losses = pytest.importorskip("pytorch_metric_learning.losses", reason="needs pytorch-metric-learning")
    from pytorch_metric_learning import miners, regularizers

    class Memory(losses.CrossBatchMemory):  # type: ignore[name-defined,misc]
        @staticmethod
        def supported_losses() -> list[str]:
            return ["RetrievalAPLoss"]

    embeddings, labels = _batch(20, 3, seed=8)
    leaf = embeddings.clone().requires_grad_()
    loss_function = RetrievalAPLoss()
    assert isinstance(loss_function, losses.BaseMetricLossFunction)
    plain = loss_function(leaf, labels)
    torch.testing.assert_close(plain, retrieval_ap_loss(embeddings, labels))
    plain.backward()
    assert leaf.grad is not None
    assert leaf.grad.any()
    mined = loss_function(embeddings, labels, miners.MultiSimilarityMiner()(embeddings, labels))
    assert 0 < mined < 1
    regularised = RetrievalAPLoss(embedding_regularizer=regularizers.LpRegularizer())
    assert regularised(embeddings, labels) > plain
    memory = Memory(loss_function, embedding_size=8, memory_size=40)
    torch.testing.assert_close(memory(embeddings, labels), plain.detach())
    others, classes = _batch(20, 3, seed=9)
    gallery, known = torch.cat([embeddings, others]), torch.cat([labels, classes])
    same = classes[:, None] == known
    itself = torch.cat([torch.zeros(20, 20, dtype=torch.bool), torch.eye(20, dtype=torch.bool)], 1)
    pairs = (*(same & ~itself).nonzero().T, *(~same).nonzero().T)
    expected = retrieval_ap_loss(others, classes, ref_embeddings=gallery, ref_labels=known, pairs=pairs)
    torch.testing.assert_close(memory(others, classes), expected)


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
