"""Who is measured: the ranking losses by method and backend, and what they are measured against.

A step is one forward and one backward pass, ready to be called again and again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bucketrank import ap_loss, rank_sort_loss, use_backend
from bucketrank.bench import flops
from bucketrank.bench.synthetic import Synthetic

LOSSES = {"ap": "AP", "rs": "RS"}
# The losses' own defaults, the paper's settings.
DELTAS = {"ap": 1.0, "rs": 0.5}
METHODS = {"pairwise": "pairwise", "bucketed": "bucketed", "exact-torch": "exact", "exact-fused": "exact"}
BASELINES = ("focal", "bce", "sort")
# Time grows with P x (P + N): estimated before it is spent.
QUADRATIC = ("pairwise", "bucketed")

TITLES = {
    "pairwise": "pairwise (definition)",
    "bucketed": "bucketed (paper)",
    "exact-torch": "exact, torch ops",
    "exact-fused": "exact, fused kernel",
    "focal": "focal loss",
    "bce": "binary cross-entropy",
    "sort": "torch.sort",
}


def focal_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sigmoid focal loss (alpha 0.25, gamma 2), summed, with the operations in which it is customarily written."""
    p = torch.sigmoid(logits)
    p_t = p * targets + (1 - p) * (1 - targets)
    alpha_t = 0.25 * targets + 0.75 * (1 - targets)
    cross_entropy = binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (alpha_t * (1 - p_t) ** 2 * cross_entropy).sum()


def ranking_loss(loss: str, name: str, logits: Tensor, targets: Tensor) -> Tensor:
    """One scalar of the loss ``ap`` or ``rs`` by the contender ``name``."""
    method = METHODS[name]
    with use_backend(name.removeprefix("exact-")) if method == "exact" else nullcontext():
        if loss == "ap":
            return ap_loss(logits, targets, delta=DELTAS[loss], method=method)
        terms = rank_sort_loss(logits, targets, delta=DELTAS[loss], method=method)
        return terms.ranking + terms.sorting


def unavailable(name: str, device: str) -> str | None:
    """Why ``name`` cannot run here, if so."""
    if name != "exact-fused":
        return None
    if torch.device(device).type != "cpu":
        return "the fused kernel takes CPU tensors only"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    return None


def step(name: str, loss: str | None, data: Synthetic) -> Callable[[], float]:
    """Forward and backward of contender ``name`` on ``data``, to be called often; returns the loss, ``sort`` only 0."""
    if name == "sort":
        return lambda: 0.0 * torch.sort(data.logits).values.numel()

    logits = data.logits.detach().clone().requires_grad_()
    # Made beforehand: the score-based losses get their binary targets for nothing.
    targets = data.targets if loss else (data.targets > 0).to(logits.dtype)

    def forward_backward() -> float:
        logits.grad = None
        if loss:
            value = ranking_loss(loss, name, logits, targets)
        else:
            value = (focal_loss if name == "focal" else binary_cross_entropy_with_logits)(logits, targets)
        value.backward()
        return float(value.detach())

    return forward_backward


def operations(name: str, loss: str | None, counts: flops.Counts) -> int:
    """Floating-point operations of one step, by the rule in :mod:`bucketrank.bench.flops`."""
    size = counts.positives + counts.negatives
    if loss is not None:
        return flops.FORMULAS[loss, METHODS[name]](counts)
    return {"focal": flops.focal, "bce": flops.cross_entropy, "sort": flops.sort}[name](size)


def synchronizer(device: str) -> Callable[[], None]:
    """Waits until the device has finished."""
    if torch.device(device).type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
