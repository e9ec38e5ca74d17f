"""Probabilistic anchor assignment (Kim & Lee, ECCV 2020), with batched EM for mixtures of two 1-D Gaussians."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bucketrank.detectors.assignment.checks import NEGATIVE, check_levels
from bucketrank.losses.comparison import precise

MAX_ITERATIONS = 100
TOLERANCE = 1e-3  # convergence: change of the mean log likelihood between two iterations
FLOOR = 1e-5  # added to every variance
CHECK_INTERVAL = 10  # iterations between convergence checks; a check is a device sync


class Mixture(NamedTuple):
    """Weights, means and variances of G mixtures, each (2, G)."""

    weights: Tensor
    means: Tensor
    variances: Tensor

    def log_densities(self, samples: Tensor) -> Tensor:
        """Compute log(weight * density) under both components: (G, M) to (2, G, M)."""
        weights, means, variances = (part[:, :, None] for part in self)
        exponents = (samples - means).square_().div_(variances).add_((2 * math.pi * variances).log_()).div_(2)
        return weights.log() - exponents


def fit_mixtures(samples: Tensor, present: Tensor) -> Mixture:
    """Fit a mixture to each row of ``samples`` (G, M), using only the entries that are ``present`` (G, M).

    The two means start at the smallest and the largest sample, the weights at 1/2, the variances at 1. Each iteration
    computes the responsibility of both components for each sample, then weights, means and variances from the
    responsibilities. A row stops after the iteration in which the mean log likelihood changed by less than 1e-3, or
    after 100 iterations.
    """
    absent, count = ~present, present.sum(1)
    lowest = samples.masked_fill(absent, torch.inf).amin(1)
    highest = samples.masked_fill(absent, -torch.inf).amax(1)
    means = torch.stack([lowest, highest])  # (2, G)
    fitted = torch.stack([torch.full_like(means, 0.5), means, torch.ones_like(means)])  # (3, 2, G)
    likelihood = torch.full_like(lowest, -torch.inf)
    active = count > 0
    # This keeps the mean of an empty component finite.
    tiny = 10 * torch.finfo(samples.dtype).eps

    for iteration in range(1, MAX_ITERATIONS + 1):
        logs = Mixture(*fitted).log_densities(samples)
        density = torch.logaddexp(logs[0], logs[1])  # (G, M)
        responsibility = (logs - density).exp_().masked_fill_(absent, 0)
        total = responsibility.sum(2).add_(tiny)
        means = (responsibility * samples).sum(2).div_(total)
        spread = (samples - means[:, :, None]).square_().mul_(responsibility).sum(2).div_(total)
        update = torch.stack([total / total.sum(0), means, spread.add_(FLOOR)])
        fitted = torch.where(active, update, fitted)

        reached = density.masked_fill_(absent, 0).sum(1).div_(count)
        active = active & ((reached - likelihood).abs_() >= TOLERANCE)  # NaN compares as False, which stops the row
        likelihood = reached
        if iteration % CHECK_INTERVAL == 0 and not bool(active.any()):
            break
    return Mixture(*fitted)


# Log densities this close count as equal. If a component has only two losses, they are mirrored about its mean, and
# rounding would decide which of them has the higher density.
EQUAL = 1e-9


@torch.no_grad()
def assign_paa(
    candidates: Tensor, losses: Tensor, *, per_level: Sequence[int], topk: int = 9, objects: int | None = None
) -> Tensor:
    """Select the positives among each object's candidates by fitting a mixture of two Gaussians to their losses.

    ``candidates`` (A,) is an assignment, for example from ``assign_max_iou`` with both thresholds 0.1 and
    ``low_quality=0``. ``losses`` (A,) gives the loss of each anchor; only the candidates' losses matter. Both may also
    be (B, A), for B images with the same anchors. ``objects`` is an upper bound for the objects per image; it saves a
    device sync.

    1. Each object keeps its ``topk`` candidates with the lowest loss on each level; ties go to the first. ``per_level``
       gives the number of anchors on each level, in order.
    2. A mixture of two Gaussians is fitted to their losses; the mean of the first component starts at the lowest loss.
       A candidate belongs to the first component if its weighted density there is at least that in the second.
    3. Of the first component's candidates, sorted by loss, the positives are those up to and including the one where
       the mixture's density is highest; of equal ones (log densities within 1e-9) the first. This is scheme (c) of the
       PAA paper's Fig. 3, with the density of the whole mixture as in the published code.

    An object gets no positives if it has fewer than two candidates, or if a loss kept in step 1 is not finite. All
    other candidates become negative; ignored anchors stay ignored.

    The mixtures of all images are fitted together in float64. Takes O(A log A) time, and at most 100 iterations over
    the losses kept.

    >>> candidates = torch.tensor([0, 0, 0, 0, 0, -1, -2])
    >>> # The three low losses of candidates have a mean of 0.53.
    >>> losses = torch.tensor([0.7, 0.5, 0.4, 3.2, 3.1, 0.0, 0.0])
    >>> assign_paa(candidates, losses, per_level=[7])
    tensor([-1,  0,  0, -1, -1, -1, -2])
    """
    name = "assign_paa"
    if candidates.dim() not in (1, 2) or candidates.dtype != torch.int64:
        raise ValueError(
            f"{name}: expected candidates to be an assignment, int64 of shape (A,) or (B, A), "
            f"got {candidates.dtype} of shape {tuple(candidates.shape)}"
        )
    if losses.shape != candidates.shape:
        raise ValueError(
            f"{name}: expected losses of shape {tuple(candidates.shape)} like candidates, got {tuple(losses.shape)}"
        )
    check_levels(name, per_level, candidates.shape[-1], topk)

    assignment = candidates.clamp(max=NEGATIVE)
    if not candidates.numel():
        return assignment
    objects = max(int(candidates.max()) + 1, 0) if objects is None else objects
    table = _lowest(candidates, losses, per_level=per_level, topk=topk, objects=objects)  # (images * objects, M)
    if not len(table):
        return assignment
    samples = precise(losses).flatten()[table.clamp(min=0)].masked_fill_(table < 0, torch.inf)
    samples, order = samples.sort(dim=1, stable=True)
    table = table.gather(1, order)
    columns = torch.arange(table.shape[1], device=table.device)
    used = int((columns + 1).where(table >= 0, 0).max())  # device sync; empty columns would cost time
    table, columns, present = table[:, :used], columns[:used], table[:, :used] >= 0
    samples = samples[:, :used].masked_fill(~present, 0)

    if not used:
        return assignment
    first, second = fit_mixtures(samples, present).log_densities(samples)
    members = present & (first >= second)
    density = torch.logaddexp(first, second).masked_fill_(~members, -torch.inf)
    peak = (density >= density.amax(1, keepdim=True) - EQUAL).int().argmax(1, keepdim=True)  # the first
    kept = members & (columns <= peak) & (present.sum(1, keepdim=True) > 1)
    # Entries that are not kept go to an extra slot behind the last anchor, which is cut off.
    anchors = table.where(kept, candidates.numel()).flatten()
    owners = (torch.arange(len(table), device=table.device) % objects)[:, None].expand_as(table).flatten()
    return F.pad(assignment.flatten(), (0, 1)).scatter_(0, anchors, owners)[:-1].view_as(assignment)


def _lowest(candidates: Tensor, losses: Tensor, *, per_level: Sequence[int], topk: int, objects: int) -> Tensor:
    """Tabulate the anchors that each object keeps: a row per object, ``topk`` columns per level.

    The rows of all images are concatenated, and anchors are numbered across images. Each level is sorted by loss; the
    sort is stable. Empty entries are -1.
    """
    anchors = (candidates >= 0).flatten().nonzero().squeeze(1)  # device sync
    count, levels, width = candidates.shape[-1], len(per_level), min(topk, max(per_level))
    device = candidates.device
    level_of = torch.cat([torch.full((size,), level, device=device) for level, size in enumerate(per_level)])
    images = candidates.numel() // count
    object_of, level = candidates.flatten()[anchors], level_of[anchors % count]
    groups = (anchors // count * objects + object_of) * levels + level

    order = losses.flatten()[anchors].argsort(stable=True)
    order = order[groups[order].argsort(stable=True)]
    anchors, groups = anchors[order], groups[order]
    rank = torch.arange(len(anchors), device=device) - torch.searchsorted(groups, groups)
    size = images * objects * levels * width
    # Anchors beyond topk go to an extra slot behind the table, which is cut off.
    slots = (groups * width + rank).where(rank < width, size)
    table = torch.full((size + 1,), -1, device=device).scatter_(0, slots, anchors)
    return table[:-1].view(images * objects, levels * width)
