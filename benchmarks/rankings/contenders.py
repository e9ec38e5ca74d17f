"""Losses of other papers, written from their formulas, which the benchmarks compare with ours."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def smooth_ap(embeddings: Tensor, labels: Tensor, *, tau: float = 0.01) -> Tensor:
    """SmoothAP (Brown et al., 2020), ``1 - 1/B sum_q 1/|P_q| sum_i R_P(i) / R(i)``, for classes of any size.

    ``R(i) = 1 + sum_j sigmoid((s_j - s_i) / tau)`` over the other embeddings j, and ``R_P`` over the matches. A sigmoid
    of temperature ``tau`` compares every pair of similarities of a query, in a B x B x B tensor.
    """
    unit = nn.functional.normalize(embeddings, dim=1)
    scores = unit @ unit.T
    other = ~torch.eye(len(labels), dtype=torch.bool)
    match = (labels[:, None] == labels) & other
    # (query, i, j): how far j ranks above i. A row does not compare itself with itself.
    above = ((scores[:, None, :] - scores[:, :, None]) / tau).sigmoid() * (other[:, None, :] & other)
    ranks = 1 + above.sum(2)
    match_ranks = 1 + (above * match[:, None, :]).sum(2)
    precision = (match_ranks / ranks * match).sum(1) / match.sum(1).clamp(min=1)
    return 1 - precision[match.any(1)].mean()


def sup_con(embeddings: Tensor, labels: Tensor, *, tau: float = 0.1) -> Tensor:
    """SupCon (Khosla et al., 2020, Eq. 2): the mean over i of ``-1/|P_i| sum_p log softmax_a(s_ia / tau)[p]``.

    The softmax runs over all other embeddings a. Embeddings without a match are skipped.
    """
    unit = nn.functional.normalize(embeddings, dim=1)
    itself = torch.eye(len(labels), dtype=torch.bool)
    match = (labels[:, None] == labels) & ~itself
    log_shares = (unit @ unit.T / tau).masked_fill(itself, -torch.inf).log_softmax(1)
    errors = -log_shares.masked_fill(~match, 0).sum(1) / match.sum(1).clamp(min=1)
    return errors[match.any(1)].mean()


class MovingAverageAP(nn.Module):
    """AP loss with moving averages per sample (SOAP, Qi et al., 2021, Algorithm 1), as in LibAUC.

    For a positive i, ``u_i`` averages the squared hinge loss ``l(i, j) = max(0, margin - (p_i - p_j))^2`` over all
    samples j of a batch, and ``v_i`` over its positives; ``p`` are probabilities. Of each batch they take the share
    ``gamma``. The loss has the gradient of ``-v_i / u_i``: the mean over i and j of ``(v_i - u_i [y_j = 1]) / u_i^2
    l(i, j)`` with constant factors.
    """

    averages: Tensor

    def __init__(self, samples: int, *, gamma: float = 0.9, margin: float = 0.6) -> None:
        super().__init__()
        self.gamma, self.margin = gamma, margin
        self.register_buffer("averages", torch.zeros(samples, 2))

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor) -> Tensor:
        """Compute the loss of the samples ``index`` (B,) of the training set."""
        positive = targets > 0
        if not positive.any():
            return logits.sum() * 0
        scores = logits.sigmoid()
        errors = (self.margin - (scores[positive, None] - scores)).clamp(min=0) ** 2  # (P, B)
        with torch.no_grad():
            now = torch.stack([errors.mean(1), (errors * positive).mean(1)], 1)
            own = index[positive]
            self.averages[own] = torch.lerp(self.averages[own], now, self.gamma)
            among_all, among_positives = self.averages[own].clamp(min=1e-12)[:, :, None].unbind(1)
            factors = (among_positives - among_all * positive) / among_all**2
        return (factors * errors).mean()
