"""Shared by the tests of the losses: a table of all losses, their oracles and ways to compute them; hard inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bucketrank
from bucketrank import alrp_loss, ap_loss, dr_loss, rank_sort_loss
from bucketrank.losses import comparison

from . import oracle

DELTAS = (0.0, 0.1, 0.5, 1.0, 5.0)

# A way to compute a loss: (method, backend). The backend "device" is "torch" as on a GPU: see use_backend below.
Way = tuple[Any, Any]
# All that must give the definition's numbers.
FAITHFUL: tuple[Way, ...] = (("pairwise", "torch"), ("exact", "torch"), ("exact", "fused"), ("exact", "device"))
EVERY: tuple[Way, ...] = (*FAITHFUL, ("bucketed", "torch"), ("bucketed", "device"))


class _HostsOfThread(threading.local):
    """The types of host devices, which every thread sets for itself."""

    types = comparison.HOSTS

    def __contains__(self, device_type: object) -> bool:
        return device_type in self.types


_hosts = _HostsOfThread()
comparison.HOSTS = _hosts


@contextmanager
def use_backend(name: Any) -> Iterator[str]:
    """Force a backend in this thread and yield its name in the package.

    "device" runs torch operations on the CPU as on a device: with as few launches as possible, and without reading
    values, for which the host would have to wait.
    """
    package_name: Any = "torch" if name == "device" else name
    outside = _hosts.types
    _hosts.types = () if name == "device" else _HostsOfThread.types
    try:
        with bucketrank.use_backend(package_name):
            yield package_name
    finally:
        _hosts.types = outside


class Loss(NamedTuple):
    compute: Callable[..., tuple[Tensor, ...]]
    oracle: Callable[[Tensor, Tensor, float], oracle.Answer]
    ways: tuple[Way, ...] = EVERY
    deltas: tuple[float, ...] = DELTAS


def localisation_errors(targets: Tensor) -> Tensor:
    """One error per positive, from its label, so that both have the same order.

    An error is at most 1/2. Tied positives count 1 in the localisation term and 1/2 in the rank, so the term, at most
    twice the largest error, is at most 1.
    """
    return 0.5 - 0.4 * targets[targets > 0].double()


LOSSES = {
    "ap": Loss(lambda *args, **kwargs: (ap_loss(*args, **kwargs),), oracle.ap),
    "interpolated_ap": Loss(
        lambda *args, **kwargs: (ap_loss(*args, interpolate=True, **kwargs),), oracle.interpolated_ap
    ),
    "rank_sort": Loss(rank_sort_loss, oracle.rank_sort),
    "alrp": Loss(
        lambda logits, targets, **kwargs: alrp_loss(logits, targets, localisation_errors(targets), **kwargs),
        lambda logits, targets, delta: oracle.alrp(logits, targets, localisation_errors(targets), delta)[0],
        ways=FAITHFUL,
    ),
    # Neither delta nor method: ordinary autograd.
    "dr": Loss(
        lambda logits, targets, **_: (dr_loss(logits, targets),),
        lambda logits, targets, _: oracle.dr(logits, targets),
        ways=(("autograd", "auto"),),
        deltas=(0.0,),
    ),
}
# Those whose gradient is defined by identity update.
RANKING = tuple(name for name in LOSSES if name != "dr")


def pairs(losses: Iterable[str] = LOSSES, *, skip: Collection[str] = ()) -> list[tuple[str, Way]]:
    """Every loss with every way to compute it, except by the methods in ``skip``."""
    return [(name, way) for name in losses for way in LOSSES[name].ways if way[0] not in skip]


def triples(losses: Iterable[str] = LOSSES, *, skip: Collection[str] = ()) -> list[tuple[str, float, Way]]:
    """Every loss with every delta and every way to compute it, except by the methods in ``skip``."""
    return [(name, delta, way) for name, way in pairs(losses, skip=skip) for delta in LOSSES[name].deltas]


def identify(value: Any) -> str:
    """The part of a test's name for a loss, a delta or a way."""
    return "-".join(value) if isinstance(value, tuple) else str(value)


def answer(
    loss: Callable[..., tuple[Tensor, ...]], logits: Tensor, targets: Tensor, *, delta: float, way: Way
) -> oracle.Answer:
    """The terms of ``loss`` and the gradient of each."""
    method, backend = way
    leaf = logits.detach().clone().requires_grad_()
    with use_backend(backend):
        terms = loss(leaf, targets, delta=delta, method=method)
        gradients = [torch.autograd.grad(term, leaf, retain_graph=True)[0] for term in terms]
    return oracle.Answer([term.detach() for term in terms], gradients)


def assert_same(got: oracle.Answer, expected: oracle.Answer, *, relative: float = 1e-6) -> None:
    """Values, and gradients by largest difference over largest value, agree to ``relative``."""
    for ours, theirs in zip(got.values + got.gradients, expected.values + expected.gradients, strict=True):
        largest = theirs.double().abs().max().item() if theirs.numel() else 0.0
        # What should be zero may be off by rounding of numbers near 1.
        allowed = relative * largest if largest > 1e-9 else 1e-12
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=allowed, equal_nan=True)


def total(terms: Iterable[Tensor]) -> Tensor:
    """The loss that trains with all terms."""
    return torch.stack(list(terms)).sum()


def synthetic(size: int, positives: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The paper's synthetic data: positives from N(-1, 1), negatives from N(1, 1), labels uniform; shuffled."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator) + 1
    logits[:positives] -= 2
    targets = torch.zeros(size)
    targets[:positives] = 0.01 + 0.99 * torch.rand(positives, generator=generator)
    order = torch.randperm(size, generator=generator)
    return logits[order], targets[order]


def _with_ignored(logits: Tensor, targets: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ignored = (torch.rand(targets.shape, generator=generator) < 0.1) & (targets == 0)
    return logits, targets.masked_fill(ignored, -1)


def hard_inputs() -> dict[str, tuple[Tensor, Tensor]]:
    """Small inputs, each with a difficulty of its own."""
    logits, targets = _with_ignored(*synthetic(240, 40), seed=1)
    on_grid = (logits * 4).round() / 4
    few_labels = torch.where(targets > 0, (targets * 4).ceil() / 4, targets)
    clusters = torch.tensor([-3.0, 0.0, 0.0, 7.0]).repeat(60) + logits * 1e-3
    far = torch.where(targets == 0, logits - 1000, logits)
    return {
        "plain": (logits, targets),
        "ties": (on_grid, targets),
        "ties and equal labels": (on_grid, few_labels),
        "all logits equal": (torch.full_like(logits, 0.3), targets),
        "all labels equal": (logits, (targets > 0).float() - (targets < 0).float()),
        "clusters": (clusters, targets),
        "offset 1e4": (logits + 1e4, targets),
        "offset -1e4, ties": (on_grid - 1e4, few_labels),
        "spread 1e-4": (logits * 1e-4, targets),
        "spread 1e3": (logits * 1e3, targets),
        "one positive": (logits, torch.where(torch.arange(240) == 17, 0.7, 0.0)),
        "one positive, one negative": (torch.tensor([0.2, 0.1]), torch.tensor([0.0, 0.4])),
        "one positive alone": (torch.tensor([0.2]), torch.tensor([0.4])),
        "no negatives": (logits, targets.abs().clamp(min=0.1)),
        "no relevant negative": (far, targets),
        "outlier": (torch.where(torch.arange(240) == targets.argmax(), 1e6, logits), targets),
        # Every comparison lies exactly on an edge of a ramp for delta 0.5 and 1.
        "on the edges": (torch.arange(240).remainder(5) * 0.5, targets),
    }
