"""One-dimensional mixtures of two Gaussians, fitted in batches by expectation maximisation."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ITERATIONS = 100
TOLERANCE = 1e-3  # of the mean log likelihood, between two iterations
FLOOR = 1e-5  # added to every variance
TEST_EVERY = 10  # iterations between tests whether all rows have converged; a test synchronises the GPU


class Mixture(NamedTuple):
    """Weights, means and variances of G mixtures, each (G, 2)."""

    weights: Tensor
    means: Tensor
    variances: Tensor

    def log_densities(self, samples: Tensor) -> Tensor:
        """Return the log of weight times density under both components: (G, M) to (2, G, M)."""
        weights, means, variances = (part.T[:, :, None] for part in self)
        return weights.log() - ((2 * math.pi * variances).log() + (samples - means).square() / variances) / 2


def fit_mixtures(samples: Tensor, present: Tensor) -> Mixture:
    """Fit a mixture to each row of ``samples`` (G, M), using only the entries that are ``present`` (G, M).

    The two means start at the smallest and the largest sample, the weights at 1/2, the variances at 1. Each iteration
    computes the responsibility of both components for each sample, then weights, means and variances from the
    responsibilities. A row stops after the iteration in which the mean log likelihood changed by less than 1e-3, or
    after 100 iterations.
    """
    count = present.sum(1)
    least = samples.masked_fill(~present, torch.inf).amin(1)
    most = samples.masked_fill(~present, -torch.inf).amax(1)
    means = torch.stack([least, most], 1)
    fitted = Mixture(torch.full_like(means, 0.5), means, torch.ones_like(means))
    likelihood = torch.full_like(least, -torch.inf)
    active = count > 0
    # Keeps the mean of a component without any samples finite.
    tiny = 10 * torch.finfo(samples.dtype).eps

    for iteration in range(1, ITERATIONS + 1):
        logs = fitted.log_densities(samples)
        density = torch.logaddexp(logs[0], logs[1])  # (G, M)
        responsibility = (logs - density).exp().where(present, 0)
        total = responsibility.sum(2) + tiny  # (2, G)
        means = (responsibility * samples).sum(2) / total
        spread = (responsibility * (samples - means[:, :, None]).square()).sum(2) / total
        update = Mixture((total / total.sum(0)).T, means.T, spread.T + FLOOR)
        fitted = Mixture(*(torch.where(active[:, None], new, old) for new, old in zip(update, fitted, strict=True)))

        reached = density.where(present, 0).sum(1) / count
        active = active & ((reached - likelihood).abs() >= TOLERANCE)  # False, so stopped, where it is NaN
        likelihood = reached
        if iteration % TEST_EVERY == 0 and not bool(active.any()):
            break
    return fitted
