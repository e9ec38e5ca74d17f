"""Probabilistic anchor assignment (Kim & Lee, ECCV 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bucketrank.ops.assignment.checks import NEGATIVE, check_levels, precise
from bucketrank.ops.assignment.mixture import fit_mixtures

# Log densities this close are equal. Two losses alone in a component stand mirrored about its mean: which of them had
# the higher density would be a matter of rounding.
EQUAL = 1e-9


@torch.no_grad()
def assign_paa(candidates: Tensor, losses: Tensor, *, per_level: Sequence[int], topk: int = 9) -> Tensor:
    """Keep, of the anchors given to each object, those whose loss tells them to be the good ones.

    ``candidates`` (A,) is an assignment, as of ``assign_max_iou`` with thresholds 0.1 and 0.1 and low quality from 0;
    ``losses`` (A,) are what the anchors cost where they are candidates. Of each object's candidates the ``topk`` of
    lowest loss on each level (``per_level`` anchors each, in order) are looked at, of equal ones the first. A mixture
    of two Gaussians is fitted to their losses. They belong to its first component, which started at the lowest loss, if
    their density weighs at least as much there as in the second. Of those that do, sorted by loss, the positives are
    all up to and including the one of the highest density of the mixture, of equal ones (within 1e-9 of its log) the
    first: scheme (c) of the paper's Fig. 3, by the density of the whole mixture as in the authors' code.

    An object of fewer than two candidates, or with a loss among those looked at that is not a finite number, gets no
    positives. All that is not kept becomes negative; what was ignored stays so.

    The mixtures are fitted together, in float64: O(A log A) and at most 100 steps over all the losses looked at.

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
    anchors, place = _sorted_groups(anchors, candidates[anchors], losses)

    owner = candidates[anchors]
    shape = int(owner.max()) + 1, int(place.max()) + 1  # objects G, losses looked at M
    samples = precise(losses.new_zeros(shape)).index_put_((owner, place), precise(losses[anchors]))
    present = torch.zeros_like(samples, dtype=torch.bool).index_put_((owner, place), torch.ones_like(place).bool())

    first, second = fit_mixtures(samples, present).log_densities(samples)
    members = present & (first >= second)
    density = torch.logaddexp(first, second).masked_fill(~members, -torch.inf)
    peak = (density >= density.amax(1, keepdim=True) - EQUAL).int().argmax(1, keepdim=True)  # the first of them
    kept = members & (torch.arange(shape[1], device=place.device) <= peak) & (present.sum(1, keepdim=True) > 1)
    return assignment.scatter(0, anchors, owner.where(kept[owner, place], NEGATIVE))


def _sorted_groups(
    anchors: Tensor, groups: Tensor, losses: Tensor, *, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """The anchors by group and then by loss, not more than ``most`` of a group, and each one's place in its group."""
    order = losses[anchors].argsort(stable=True)
    order = order[groups[order].argsort(stable=True)]
    anchors, groups = anchors[order], groups[order]
    place = torch.arange(len(anchors), device=anchors.device) - torch.searchsorted(groups, groups)
    if most is None:
        return anchors, place
    few = place < most
    return anchors[few], place[few]
