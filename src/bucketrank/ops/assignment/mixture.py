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
        return _log_densities(samples, *(part.T for part in self))


def fit_mixtures(samples: Tensor, present: Tensor) -> Mixture:
    """Fit a mixture to each row of ``samples`` (G, M), using only the entries that are ``present`` (G, M).

    The two means start at the smallest and the largest sample, the weights at 1/2, the variances at 1. Each iteration
    computes the responsibility of both components for each sample, then weights, means and variances from the
    responsibilities. A row stops after the iteration in which the mean log likelihood changed by less than 1e-3, or
    after 100 iterations.
    """
    absent, count = ~present, present.sum(1)
    least = samples.masked_fill(absent, torch.inf).amin(1)
    most = samples.masked_fill(absent, -torch.inf).amax(1)
    means = torch.stack([least, most])  # (2, G)
    fitted = torch.stack([torch.full_like(means, 0.5), means, torch.ones_like(means)])  # (3, 2, G)
    likelihood = torch.full_like(least, -torch.inf)
    active = count > 0
    # Keeps the mean of a component without any samples finite.
    tiny = 10 * torch.finfo(samples.dtype).eps

    for iteration in range(1, ITERATIONS + 1):
        logs = _log_densities(samples, *fitted)
        density = torch.logaddexp(logs[0], logs[1])  # (G, M)
        responsibility = (logs - density).exp_().masked_fill_(absent, 0)
        total = responsibility.sum(2).add_(tiny)
        means = (responsibility * samples).sum(2).div_(total)
        spread = (samples - means[:, :, None]).square_().mul_(responsibility).sum(2).div_(total)
        update = torch.stack([total / total.sum(0), means, spread.add_(FLOOR)])
        fitted = torch.where(active, update, fitted)

        reached = density.masked_fill_(absent, 0).sum(1).div_(count)
        active = active & ((reached - likelihood).abs_() >= TOLERANCE)  # False, so stopped, where it is NaN
        likelihood = reached
        if iteration % TEST_EVERY == 0 and not bool(active.any()):
            break
    return Mixture(*fitted.transpose(1, 2))


def _log_densities(samples: Tensor, weights: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """Return the log of weight times density (2, G, M) of samples (G, M); the parameters are (2, G)."""
    weights, means, variances = weights[:, :, None], means[:, :, None], variances[:, :, None]
    exponents = (samples - means).square_().div_(variances).add_((2 * math.pi * variances).log_()).div_(2)
    return weights.log() - exponents
