"""The contenders: each ranking loss by method and backend, and the score-based losses and sort they compete with.

A step is one forward and one backward pass.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bucketrank import ap_loss, rank_sort_loss, use_backend
from bucketrank.bench.graph_replay import capture
from bucketrank.bench.losses import flops
from bucketrank.bench.losses.loss_modes import LossFunction, Mode, compile_alone
from bucketrank.bench.losses.synthetic_logits import SyntheticLogits
from bucketrank.losses.triton_backend import unavailable_reason
from bucketrank.settings.choices import Backend, Method

LOSSES = {"ap": "AP", "rs": "RS"}
# Half the width of the ramp that replaces the step function: the paper's settings, the defaults of the losses.
DELTAS = {"ap": 1.0, "rs": 0.5}
METHODS: dict[str, Method] = {
    "pairwise": "pairwise",
    "bucketed": "bucketed",
    "exact-torch": "exact",
    "exact-fused": "exact",
    "exact-triton": "exact",
}
BACKENDS: dict[str, Backend] = {"exact-torch": "torch", "exact-fused": "fused", "exact-triton": "triton"}
# At most one of them runs on a device, and is then the default.
KERNELS = ("exact-fused", "exact-triton")
EXACT = (*KERNELS, "exact-torch")
BASELINES = ("focal", "bce", "sort")
# Their time grows with P x (P + N), so it is estimated before they run.
QUADRATIC = ("pairwise", "bucketed")

TITLES = {
    "pairwise": "pairwise (definition)",
    "bucketed": "bucketed (paper)",
    "exact-torch": "exact, torch ops",
    "exact-fused": "exact, fused kernel",
    "exact-triton": "exact, Triton kernels",
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


SCORE_BASED: dict[str, LossFunction] = {"focal": focal_loss, "bce": binary_cross_entropy_with_logits}


_compiled: dict[tuple[str, str | None, int, torch.device], LossFunction] = {}


def loss_function(name: str, loss: str | None, max_positives: int | None = None) -> LossFunction:
    """Return the loss of the contender ``name`` as a function with one scalar; call it with its :func:`backend`."""
    if loss is None:
        score_based = SCORE_BASED[name]
        return lambda logits, targets: score_based(logits, targets)
    delta, method = DELTAS[loss], METHODS[name]
    if loss == "ap":
        return lambda logits, targets: ap_loss(logits, targets, delta=delta, method=method, max_positives=max_positives)

    def both_terms(logits: Tensor, targets: Tensor) -> Tensor:
        terms = rank_sort_loss(logits, targets, delta=delta, method=method, max_positives=max_positives)
        return terms.ranking + terms.sorting

    return both_terms


def backend(name: str) -> AbstractContextManager[None]:
    """Return the context in which the contender ``name`` runs: the backend that it is named after."""
    return use_backend(BACKENDS[name]) if name in BACKENDS else nullcontext()


def compiled_loss(name: str, loss: str | None, logits: Tensor) -> LossFunction:
    """Return the loss of a contender compiled for logits like these; it is compiled once for all steps."""
    key = name, loss, logits.numel(), logits.device
    if key not in _compiled:
        _compiled[key] = compile_alone(loss_function(name, loss))
    return _compiled[key]


def contender_names(device: str) -> list[str]:
    """Return the baselines and methods that belong to a device: the fused kernel to the CPU, Triton to others."""
    other = "exact-triton" if torch.device(device).type == "cpu" else "exact-fused"
    return [name for name in (*BASELINES, *METHODS) if name != other]


def why_unavailable(name: str, device: str) -> str | None:
    """Return why the contender ``name`` cannot run on this machine and device, or None if it can."""
    on_cpu = torch.device(device).type == "cpu"
    if name == "exact-fused":
        if not on_cpu:
            return "the fused kernel takes CPU tensors only"
        return "numba is not installed" if importlib.util.find_spec("numba") is None else None
    if name == "exact-triton":
        if on_cpu:
            return "the Triton kernels are for GPUs"
        reason = unavailable_reason(torch.device(device))
        return None if reason is None else reason.removesuffix(".")
    return None


def loss_step(
    name: str, loss: str | None, data: SyntheticLogits, *, mode: Mode = "eager"
) -> Callable[[], Tensor | float]:
    """Return a function that runs forward and backward of the contender ``name`` on ``data`` and returns the loss.

    The loss stays on the device, because reading it would make the host wait. ``sort`` has no loss and returns 0. A
    captured step ranks with a capacity (``max_positives``) of the positives in ``data``.
    """
    if name == "sort":
        return lambda: 0.0 * torch.sort(data.logits).values.numel()

    logits = data.logits.detach().clone().requires_grad_()
    # Binary targets are made here, so that they cost the score-based losses no time.
    targets = data.targets if loss else (data.targets > 0).to(logits.dtype)
    if mode == "compiled":
        function = compiled_loss(name, loss, logits)
    else:
        capacity = int((targets > 0).sum()) if mode == "graph" and loss else None
        function = loss_function(name, loss, capacity)

    def forward_backward() -> Tensor:
        logits.grad = None
        with backend(name):
            value = function(logits, targets)
        value.backward()
        return value.detach()

    return capture(forward_backward) if mode == "graph" else forward_backward


def count_operations(name: str, loss: str | None, counts: flops.Counts) -> int:
    """Return the floating-point operations of one step, by the rule in :mod:`bucketrank.bench.losses.flops`."""
    size = counts.positives + counts.negatives
    if loss is not None:
        return flops.FORMULAS[loss, METHODS[name]](counts)
    return {"focal": flops.focal, "bce": flops.cross_entropy, "sort": flops.sort}[name](size)
