"""The contenders: each ranking loss by method and backend, and the score-based losses and sort they compete with.

A step is one forward and one backward pass.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bucketrank import ap_loss, rank_sort_loss, use_backend
from bucketrank.bench.losses import flops
from bucketrank.bench.losses.synthetic_logits import SyntheticLogits
from bucketrank.choices import Backend, Method

LOSSES = {"ap": "AP", "rs": "RS"}
# Half the width of the ramp that replaces the step function: the paper's settings, the defaults of the losses.
DELTAS = {"ap": 1.0, "rs": 0.5}
METHODS: dict[str, Method] = {
    "pairwise": "pairwise",
    "bucketed": "bucketed",
    "exact-torch": "exact",
    "exact-fused": "exact",
}
BACKENDS: dict[str, Backend] = {"exact-torch": "torch", "exact-fused": "fused"}
BASELINES = ("focal", "bce", "sort")
# Their time grows with P x (P + N), so it is estimated before they run.
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
    """Return the summed sigmoid focal loss (alpha 0.25, gamma 2), in the operations of its usual implementations."""
    p = torch.sigmoid(logits)
    p_t = p * targets + (1 - p) * (1 - targets)
    alpha_t = 0.25 * targets + 0.75 * (1 - targets)
    cross_entropy = binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (alpha_t * (1 - p_t) ** 2 * cross_entropy).sum()


SCORE_BASED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "focal": focal_loss,
    "bce": binary_cross_entropy_with_logits,
}


def ranking_loss(loss: str, name: str, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss ``ap`` or ``rs`` as one scalar, computed by the contender ``name``."""
    method = METHODS[name]
    with use_backend(BACKENDS[name]) if name in BACKENDS else nullcontext():
        if loss == "ap":
            return ap_loss(logits, targets, delta=DELTAS[loss], method=method)
        terms = rank_sort_loss(logits, targets, delta=DELTAS[loss], method=method)
        return terms.ranking + terms.sorting


def why_unavailable(name: str, device: str) -> str | None:
    """Return why the contender ``name`` cannot run on this machine and device, or None if it can."""
    if name != "exact-fused":
        return None
    if torch.device(device).type != "cpu":
        return "the fused kernel takes CPU tensors only"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    return None


def loss_step(name: str, loss: str | None, data: SyntheticLogits) -> Callable[[], float]:
    """Return a function that runs forward and backward of the contender ``name`` on ``data`` and returns the loss.

    ``sort`` has no loss and returns 0.
    """
    if name == "sort":
        return lambda: 0.0 * torch.sort(data.logits).values.numel()

    logits = data.logits.detach().clone().requires_grad_()
    # Binary targets are made here, so that they cost the score-based losses no time.
    targets = data.targets if loss else (data.targets > 0).to(logits.dtype)

    def forward_backward() -> float:
        logits.grad = None
        value = ranking_loss(loss, name, logits, targets) if loss else SCORE_BASED[name](logits, targets)
        value.backward()
        return float(value.detach())

    return forward_backward


def count_operations(name: str, loss: str | None, counts: flops.Counts) -> int:
    """Return the floating-point operations of one step, by the rule in :mod:`bucketrank.bench.losses.flops`."""
    size = counts.positives + counts.negatives
    if loss is not None:
        return flops.FORMULAS[loss, METHODS[name]](counts)
    return {"focal": flops.focal, "bce": flops.cross_entropy, "sort": flops.sort}[name](size)
