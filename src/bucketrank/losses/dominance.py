"""Sums over the positives above a score and below a label: the sorting term in O(P log P), no P x P matrix.

The positives are ordered by label, and a wavelet tree halves that order again and again, each half kept in order of
score. "Below label u" is a prefix of the order; the prefix falls apart into at most one half per level, and in each
half "above a score" is a suffix, whose sum is the difference of two cumulative sums.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sums_before(x: Tensor, low: Tensor, high: Tensor, labels: Tensor, values: Tensor) -> Tensor:
    """sum over j with labels_j < labels_i of values_j h_ij, for each i; ``values`` is (P, K).

    ``x`` is ascending; ``h_ij`` is 0 for j < low_i, 1 for j >= high_i and x_j - x_i + 1/2 for those between.
    """
    size = x.numel()
    by_label = labels.argsort(stable=True)
    place = torch.empty_like(by_label)
    place[by_label] = torch.arange(size, device=x.device)
    prefix = torch.searchsorted(labels[by_label], labels)  # how many have a lower label

    # x = cell + fraction: sums of fractions do not grow with x, so the differences below keep their digits.
    cell = x.floor()
    first = (x - 0.5).floor()
    middle = torch.searchsorted(cell, first + 1).clamp(low, high)
    columns = torch.cat([values, values * (x - cell)[:, None]], 1)
    cuts = torch.stack([low, middle, high])  # (3, P) positions in order of score, then inside ever smaller halves

    sums = values.new_zeros(3, size, columns.shape[1])  # suffix sums from each of the three cuts
    position = torch.arange(size, device=x.device)
    order = position  # the positives as this level of the tree holds them
    for level in reversed(range((size - 1).bit_length())):
        half = 1 << level
        here = place.index_select(0, order)
        goes_right = (here >> level & 1).bool()
        lefts = torch.cat([here.new_zeros(1), (~goes_right).cumsum(0)])  # members of left halves before each position

        start = _start(here, level)
        inside = lefts[:-1] - lefts.index_select(0, start)
        order = torch.empty_like(order).index_copy_(
            0, torch.where(goes_right, position - inside + half, start + inside), order
        )

        cumulative = torch.cat([columns.new_zeros(1, columns.shape[1]), columns.index_select(0, order).cumsum(0)])
        start = _start(prefix, level)
        end = (start + half).clamp_(max=size)
        inside = lefts.index_select(0, cuts.view(-1)).view_as(cuts) - lefts.index_select(0, start)
        # Who goes right leaves the whole left half behind, in the prefix: from the cut to the end. Who goes left adds
        # nothing: from the end to the end.
        goes_right = (prefix >> level & 1).bool()
        cuts_inside = torch.where(goes_right, start + inside, end).view(-1)
        sums += cumulative.index_select(0, end) - cumulative.index_select(0, cuts_inside).view_as(sums)
        cuts = torch.where(goes_right, cuts - inside + half, start + inside)

    plain, fractions = sums.chunk(2, dim=2)
    offset = (first - x + 0.5)[:, None]
    ramp = (fractions[0] - fractions[2]) + offset * (plain[0] - plain[2]) + (plain[1] - plain[2])
    return ramp + plain[2]


def _start(place: Tensor, level: int) -> Tensor:
    """Where the node of the tree that holds ``place`` begins, before ``level`` halves it."""
    return place >> (level + 1) << (level + 1)
