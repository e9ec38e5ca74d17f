"""Sums over the positives above a score and below a label: the sorting term.

``sums_before`` takes O(P log P) without a P x P matrix, in about fifty operations per doubling of P. A few thousand
positives are faster in a matrix: ``sums_in_matrix`` takes O(P^2) in eight operations per chunk of the matrix.

A wavelet tree halves the positives, ordered by label, again and again, and keeps each half in order of score. The
positives below a label are a prefix of the order by label, which consists of at most one half per level. In each half
the positives above a score are a suffix, whose sum is the difference of two cumulative sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bucketrank.losses.step import step_


def sums_before(x: Tensor, low: Tensor, high: Tensor, labels: Tensor, values: Tensor) -> Tensor:
    """Return the sum over j with labels_j < labels_i of values_j h_ij, for each i; ``values`` is (P, K).

    ``x`` is ascending; ``h_ij`` is 0 for j < low_i, 1 for j >= high_i and x_j - x_i + 1/2 for those between.
    """
    size = x.numel()
    by_label = labels.argsort(stable=True)
    label_rank = torch.empty_like(by_label)  # positions in the order by label
    label_rank[by_label] = torch.arange(size, device=x.device)
    prefix = torch.searchsorted(labels[by_label], labels)  # number of positives with a lower label

    # x = cell + fraction. Sums of fractions do not grow with x, so their differences keep their digits.
    cell = x.floor()
    first = (x - 0.5).floor()
    middle = torch.searchsorted(cell, first + 1).clamp(low, high)
    columns = torch.cat([values, values * (x - cell)[:, None]], 1)
    cuts = torch.stack([low, middle, high])  # (3, P) positions in order of score, then inside ever smaller halves

    sums = values.new_zeros(3, size, columns.shape[1])  # suffix sums from each of the three cuts
    position = torch.arange(size, device=x.device)
    order = position  # the positives in the order of this level of the tree
    for level in reversed(range((size - 1).bit_length())):
        half = 1 << level
        label_ranks = label_rank.index_select(0, order)
        goes_right = (label_ranks >> level & 1).bool()
        # Members of left halves before each position.
        lefts = torch.cat([label_ranks.new_zeros(1), (~goes_right).cumsum(0)])

        start = _node_start(label_ranks, level)
        inside = lefts[:-1] - lefts.index_select(0, start)
        order = torch.empty_like(order).index_copy_(
            0, torch.where(goes_right, position - inside + half, start + inside), order
        )

        cumulative = torch.cat([columns.new_zeros(1, columns.shape[1]), columns.index_select(0, order).cumsum(0)])
        start = _node_start(prefix, level)
        end = (start + half).clamp_(max=size)
        inside = lefts.index_select(0, cuts.view(-1)).view_as(cuts) - lefts.index_select(0, start)
        # A prefix that ends in the right half contains the whole left half: add it from the cut to its end. One that
        # ends in the left half adds nothing here: the sum from the end to the end.
        goes_right = (prefix >> level & 1).bool()
        cuts_inside = torch.where(goes_right, start + inside, end).view(-1)
        sums += cumulative.index_select(0, end) - cumulative.index_select(0, cuts_inside).view_as(sums)
        cuts = torch.where(goes_right, cuts - inside + half, start + inside)

    plain, fractions = sums.chunk(2, dim=2)
    offset = (first - x + 0.5)[:, None]
    ramp = (fractions[0] - fractions[2]) + offset * (plain[0] - plain[2]) + (plain[1] - plain[2])
    return ramp + plain[2]


def _node_start(label_rank: Tensor, level: int) -> Tensor:
    """Return the first position of the node that contains ``label_rank`` and that ``level`` halves."""
    return label_rank >> (level + 1) << (level + 1)


def sums_in_matrix(scores: Tensor, delta: float, labels: Tensor, values: Tensor, chunk: int) -> Tensor:
    """Return the sum over j with labels_j < labels_i of H(s_j - s_i) values_j, for each i; ``values`` is (P, K).

    ``chunk`` is the number of comparisons in memory at a time.
    """
    rows = max(1, chunk // scores.numel())
    sums = []
    for start in range(0, scores.numel(), rows):
        block = slice(start, start + rows)
        compared = step_(scores - scores[block, None], delta).mul_(labels < labels[block, None])
        sums.append(compared @ values)
    return sums[0] if len(sums) == 1 else torch.cat(sums)
