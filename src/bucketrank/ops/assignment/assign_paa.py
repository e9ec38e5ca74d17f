"""Probabilistic anchor assignment (Kim & Lee, ECCV 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bucketrank.ops.assignment.checks import NEGATIVE, check_levels, precise
from bucketrank.ops.assignment.mixture import fit_mixtures

# Log densities this close count as equal. If a component has only two losses, they are mirrored about its mean, and
# rounding would decide which of them has the higher density.
EQUAL = 1e-9


@torch.no_grad()
def assign_paa(candidates: Tensor, losses: Tensor, *, per_level: Sequence[int], topk: int = 9) -> Tensor:
    """Keep, of each object's candidates, those with low losses according to a mixture of two Gaussians.

    ``candidates`` (A,) is an assignment, for example from ``assign_max_iou`` with both thresholds 0.1 and
    ``low_quality=0``. ``losses`` (A,) gives the loss of each anchor; only the candidates' losses matter.

    1. Each object keeps, on each level, its ``topk`` candidates of lowest loss; of equal ones the first. ``per_level``
       gives the number of anchors on each level, in order.
    2. A mixture of two Gaussians is fitted to their losses; the mean of the first component starts at the lowest loss.
       A candidate belongs to the first component if its weighted density there is at least that in the second.
    3. Of the first component's candidates, sorted by loss, the positives are those up to and including the one where
       the mixture's density is highest; of equal ones (log densities within 1e-9) the first. This is scheme (c) of the
       paper's Fig. 3, with the density of the whole mixture as in the published code.

    An object gets no positives if it has fewer than two candidates, or if a loss kept in step 1 is not finite. All
    other candidates become negative; ignored anchors stay ignored.

    The mixtures are fitted together in float64. Takes O(A log A) time, and at most 100 iterations over the losses kept.

    >>> candidates = torch.tensor([0, 0, 0, 0, 0, -1, -2])
    >>> losses = torch.tensor([0.7, 0.5, 0.4, 3.2, 3.1, 0.0, 0.0])  # the low ones have their mean at 0.53
    >>> assign_paa(candidates, losses, per_level=[7])
    tensor([-1,  0,  0, -1, -1, -1, -2])
    """
    name = "assign_paa"
    if candidates.dim() != 1 or candidates.dtype != torch.int64:
        raise ValueError(
            f"{name}: expected candidates to be an assignment, int64 of shape (A,), "
            f"got {candidates.dtype} of shape {tuple(candidates.shape)}"
        )
    if losses.shape != candidates.shape:
        raise ValueError(
            f"{name}: expected losses of shape {tuple(candidates.shape)} like candidates, got {tuple(losses.shape)}"
        )
    check_levels(name, per_level, len(candidates), topk)

    assignment = candidates.clamp(max=NEGATIVE)
    anchors = (candidates >= 0).nonzero().squeeze(1)
    if not len(anchors):
        return assignment
    ends = torch.tensor(list(per_level), device=anchors.device).cumsum(0)
    level = torch.bucketize(anchors, ends, right=True)
    anchors, _ = _sorted_groups(anchors, candidates[anchors] * len(per_level) + level, losses, most=topk)
    anchors, rank = _sorted_groups(anchors, candidates[anchors], losses)

    owner = candidates[anchors]
    shape = int(owner.max()) + 1, int(rank.max()) + 1  # objects G, most losses per object M
    samples = precise(losses.new_zeros(shape)).index_put_((owner, rank), precise(losses[anchors]))
    present = torch.zeros_like(samples, dtype=torch.bool).index_put_((owner, rank), torch.ones_like(rank).bool())

    first, second = fit_mixtures(samples, present).log_densities(samples)
    members = present & (first >= second)
    density = torch.logaddexp(first, second).masked_fill(~members, -torch.inf)
    peak = (density >= density.amax(1, keepdim=True) - EQUAL).int().argmax(1, keepdim=True)  # the first
    kept = members & (torch.arange(shape[1], device=rank.device) <= peak) & (present.sum(1, keepdim=True) > 1)
    return assignment.scatter(0, anchors, owner.where(kept[owner, rank], NEGATIVE))


def _sorted_groups(
    anchors: Tensor, groups: Tensor, losses: Tensor, *, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return at most ``most`` anchors per group, sorted by group, then by loss, and the rank of each in its group."""
    order = losses[anchors].argsort(stable=True)
    order = order[groups[order].argsort(stable=True)]
    anchors, groups = anchors[order], groups[order]
    rank = torch.arange(len(anchors), device=anchors.device) - torch.searchsorted(groups, groups)
    if most is None:
        return anchors, rank
    kept = rank < most
    return anchors[kept], rank[kept]
