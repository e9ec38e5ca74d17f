"""Mixtures of two Gaussians on the line, many at once, fitted by expectation maximisation."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ITERATIONS = 100
TOLERANCE = 1e-3  # of the mean log likelihood, between two iterations
FLOOR = 1e-5  # added to every variance
LOOK = 10  # iterations between two looks whether all have ended: on a GPU a look waits for all work queued


class Mixture(NamedTuple):
    """Weights, means and variances of G mixtures, each (G, 2)."""

    weights: Tensor
    means: Tensor
    variances: Tensor

    def log_densities(self, samples: Tensor) -> Tensor:
        """The log of weight times density, under both components: (G, M) to (2, G, M)."""
        weights, means, variances = (part.T[:, :, None] for part in self)
        return weights.log() - ((2 * math.pi * variances).log() + (samples - means).square() / variances) / 2


def fit_mixtures(samples: Tensor, present: Tensor) -> Mixture:
    """Fit a mixture to each row of ``samples`` (G, M), as far as ``present`` (G, M).

    The two means start at the least and the greatest sample, the weights at 1/2, the variances at 1. An iteration
    computes the shares of the two components in each sample, then weights, means and variances from the shares. A row
    ends with the iteration that finds the mean log likelihood within 1e-3 of what the one before found, after 100 at
    the latest.
    """
    count = present.sum(1)
    least = samples.masked_fill(~present, torch.inf).amin(1)
    most = samples.masked_fill(~present, -torch.inf).amax(1)
    means = torch.stack([least, most], 1)
    fitted = Mixture(torch.full_like(means, 0.5), means, torch.ones_like(means))
    likelihood = torch.full_like(least, -torch.inf)
    going = count > 0
    # Keeps the mean of a component without any share finite.
    nothing = 10 * torch.finfo(samples.dtype).eps

    for iteration in range(1, ITERATIONS + 1):
        logs = fitted.log_densities(samples)
        density = torch.logaddexp(logs[0], logs[1])  # (G, M)
        shares = (logs - density).exp().where(present, 0)
        total = shares.sum(2) + nothing  # (2, G)
        means = (shares * samples).sum(2) / total
        spread = (shares * (samples - means[:, :, None]).square()).sum(2) / total
        update = Mixture((total / total.sum(0)).T, means.T, spread.T + FLOOR)
        fitted = Mixture(*(torch.where(going[:, None], new, old) for new, old in zip(update, fitted, strict=True)))

        reached = density.where(present, 0).sum(1) / count
        going = going & ((reached - likelihood).abs() >= TOLERANCE)  # and so ends where it is not a number
        likelihood = reached
        if iteration % LOOK == 0 and not bool(going.any()):
            break
    return fitted
