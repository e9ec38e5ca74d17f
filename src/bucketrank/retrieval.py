"""Average Precision loss for retrieval: every embedding is a query that ranks the others by similarity.

``L = 1/|Q| sum_q AP loss(q)``, where the positives of a query are the embeddings with the same label. Queries without a
match are skipped. Each chunk of queries is one call of :func:`~bucketrank.ap_loss`. A batch of B embeddings takes
O(B^2 D) time and O(B D) memory besides the chunk, and never a B x B x B tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from bucketrank.losses import ap_loss
from bucketrank.losses.functional import check_choice, check_settings

MetricLoss: Any = nn.Module
with suppress(ImportError):  # optional
    from pytorch_metric_learning.losses import BaseMetricLossFunction

    MetricLoss = BaseMetricLossFunction

Similarity = Literal["cosine", "dot", "euclidean"]
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)

# Cosine similarities lie between -1 and 1, so the smoothed step is narrower than for logits.
RETRIEVAL_DELTA = 0.2
# Similarities that are computed at once.
CHUNK = 1 << 22


def retrieval_ap_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    ref_embeddings: Tensor | None = None,
    ref_labels: Tensor | None = None,
    pairs: Sequence[Tensor] | None = None,
    delta: float = RETRIEVAL_DELTA,
    similarity: Similarity = "cosine",
) -> Tensor:
    """Retrieval AP loss, ``1/|Q| sum_q AP loss of the similarities to q``, over the queries q that have a match.

    Without references, every embedding is compared with all others, and never with itself. The gradient reaches queries
    and references. Classes may have different sizes. Without any match the loss is 0, with gradient 0.

    Args:
        embeddings: the queries, of shape (B, D).
        labels: their classes, integers of shape (B,).
        ref_embeddings: the entries to rank, of shape (R, D); by default the queries themselves.
        ref_labels: their classes, of shape (R,).
        pairs: the entries to rank, instead of all: indices as miners return them, ``(query, match, query, other)`` or
            the triplets ``(query, match, other)``.
        delta: two similarities closer than this count as partly tied.
        similarity: ``"cosine"``, ``"dot"`` or ``"euclidean"`` (the negative distance).

    >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    >>> retrieval_ap_loss(embeddings, torch.tensor([0, 0, 1, 1]))
    tensor(0.)
    >>> # Two queries have their match in second place, two in third: (1/2 + 2/3) / 2.
    >>> retrieval_ap_loss(embeddings, torch.tensor([0, 1, 0, 1]), delta=0)
    tensor(0.5833)
    """
    check_settings("retrieval_ap_loss", delta, "exact")
    check_choice("retrieval_ap_loss", "similarity", similarity, SIMILARITIES)
    if (ref_embeddings is None) != (ref_labels is None):
        missing = "ref_labels" if ref_labels is None else "ref_embeddings"
        raise ValueError(f"retrieval_ap_loss: expected ref_embeddings and ref_labels together, got no {missing}")
    _check_pair("embeddings", embeddings, "labels", labels)
    within = ref_embeddings is None or ref_labels is None
    references = embeddings if ref_embeddings is None else ref_embeddings
    classes = labels if ref_labels is None else ref_labels
    _check_pair("ref_embeddings", references, "ref_labels", classes)
    if references.shape[1] != embeddings.shape[1]:
        raise ValueError(
            f"retrieval_ap_loss: expected ref_embeddings of {embeddings.shape[1]} columns like embeddings, "
            f"got {references.shape[1]}"
        )
    if similarity == "cosine":
        embeddings = nn.functional.normalize(embeddings, dim=1)
        references = embeddings if within else nn.functional.normalize(references, dim=1)
    chosen = None if pairs is None else _check_pairs(pairs)
    compared = _Compared(labels, classes, within, chosen, float(delta), similarity)
    loss: Tensor = _RetrievalAP.apply(embeddings, references, compared)
    return loss


class _Compared(NamedTuple):
    """Everything about a call except its embeddings."""

    labels: Tensor
    classes: Tensor  # the labels of the references
    within: bool  # whether the references are the queries
    pairs: Sequence[Tensor] | None  # queries and their matches, queries and others; None: all
    delta: float
    similarity: Similarity

    def targets(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Build the targets of some queries, of shape (stop - start, R); -1 for entries that are not compared."""
        targets = (self.labels[start:stop, None] == self.classes).to(dtype)
        if self.pairs is not None:
            targets.fill_(-1)
            for (query, entry), target in zip((self.pairs[:2], self.pairs[2:]), (1, 0), strict=True):
                inside = (query >= start) & (query < stop)
                targets[query[inside] - start, entry[inside]] = target
        elif self.within:  # an embedding is not its own match
            targets.diagonal(start).fill_(-1)
        return targets


class _RetrievalAP(torch.autograd.Function):
    """The mean AP loss of all queries, one chunk of queries at a time.

    The forward pass carries the gradient of a chunk to the embeddings at once. So no chunk's similarities are kept, and
    the memory for the backward pass is that of the embeddings.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, references: Tensor, compared: _Compared) -> Tensor:
        dtype = torch.promote_types(queries.dtype, torch.float32)
        at_queries, at_references = (torch.zeros_like(part, dtype=dtype) for part in (queries, references))
        total = torch.zeros((), dtype=dtype, device=queries.device)
        matched = torch.zeros((), dtype=torch.int64, device=queries.device)
        rows = max(1, CHUNK // max(1, len(references)))
        for start in range(0, len(queries), rows):
            chunk = slice(start, start + rows)
            targets = compared.targets(start, start + rows, dtype)
            matched += (targets > 0).any(1).sum()
            # In half precision, neighbouring similarities would become equal.
            with torch.enable_grad(), torch.autocast(queries.device.type, enabled=False):
                leaf, other = (part.detach().to(dtype).requires_grad_() for part in (queries[chunk], references))
                scores = _compare(leaf, other, compared.similarity)
                sizes = [len(references)] * len(scores)
                loss = ap_loss(scores, targets, delta=compared.delta, sizes=sizes, reduction="none").sum()
                of_chunk, of_references = torch.autograd.grad(loss, (leaf, other))
            at_queries[chunk] = of_chunk
            at_references += of_references
            total += loss.detach()
        matched = matched.clamp(min=1)
        ctx.save_for_backward(at_queries / matched, at_references / matched)
        return (total / matched).to(queries.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        at_queries, at_references = ctx.saved_tensors
        return upstream * at_queries, upstream * at_references, None


def _compare(queries: Tensor, references: Tensor, similarity: str) -> Tensor:
    return -torch.cdist(queries, references) if similarity == "euclidean" else queries @ references.T


def _check_pair(name: str, embeddings: Tensor, labels_name: str, labels: Tensor) -> None:
    for argument, value in ((name, embeddings), (labels_name, labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"retrieval_ap_loss: expected {argument} to be a tensor, got {type(value).__name__}")
    if embeddings.dim() != 2 or not embeddings.is_floating_point():
        raise ValueError(
            f"retrieval_ap_loss: expected {name} of shape (B, D) and a float dtype, got {tuple(embeddings.shape)} "
            f"and {embeddings.dtype}"
        )
    if labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"retrieval_ap_loss: expected {labels_name} of shape ({len(embeddings)},), one for each of {name}, "
            f"got {tuple(labels.shape)}"
        )


def _check_pairs(pairs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Turn triplets into pairs."""
    shapes = {part.shape for part in pairs}
    if len(pairs) == 3 and len(shapes) == 1:
        return pairs[0], pairs[1], pairs[0], pairs[2]
    if len(pairs) == 4 and pairs[0].shape == pairs[1].shape and pairs[2].shape == pairs[3].shape:
        return pairs
    raise ValueError(
        "retrieval_ap_loss: expected pairs to be 4 index tensors (query, match, query, other) or 3 of one length, got "
        f"{len(pairs)} of lengths {', '.join(str(len(part)) for part in pairs)}"
    )


class RetrievalAPLoss(MetricLoss):
    """:func:`retrieval_ap_loss` with its settings, called like the losses of pytorch-metric-learning.

    ``loss(embeddings, labels)`` compares a batch with itself; ``ref_emb`` and ``ref_labels`` compare it with others;
    ``indices_tuple`` limits the rankings to the pairs or triplets of a miner. If pytorch-metric-learning is installed,
    this is one of its losses and takes its further options, such as ``embedding_regularizer``. Reducers get the mean
    over the queries.
    """

    def __init__(self, *, delta: float = RETRIEVAL_DELTA, similarity: Similarity = "cosine", **options: Any) -> None:
        if "distance" in options:
            raise TypeError("RetrievalAPLoss: expected no distance, got one; use similarity")
        super().__init__(**options)
        check_settings("RetrievalAPLoss", delta, "exact")
        check_choice("RetrievalAPLoss", "similarity", similarity, SIMILARITIES)
        self.delta, self.similarity = delta, similarity

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> dict[str, Any]:
        """Return the loss as pytorch-metric-learning expects it."""
        within = ref_emb is None or ref_emb is embeddings
        loss = retrieval_ap_loss(
            embeddings,
            labels,
            ref_embeddings=None if within else ref_emb,
            ref_labels=None if within else ref_labels,
            pairs=indices_tuple,
            delta=self.delta,
            similarity=self.similarity,
        )
        return {"loss": {"losses": loss, "indices": None, "reduction_type": "already_reduced"}}

    if MetricLoss is nn.Module:

        def forward(
            self,
            embeddings: Tensor,
            labels: Tensor,
            indices_tuple: Sequence[Tensor] | None = None,
            ref_emb: Tensor | None = None,
            ref_labels: Tensor | None = None,
        ) -> Tensor:
            loss: Tensor = self.compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)["loss"]["losses"]
            return loss

    def extra_repr(self) -> str:
        return f"delta={self.delta}, similarity={self.similarity!r}"
