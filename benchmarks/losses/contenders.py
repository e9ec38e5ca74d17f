"""The contenders: each ranking loss by method and backend, score-based losses, and a plain sort.

A step is one forward and one backward pass, eager, compiled by ``torch.compile`` or replayed as a CUDA graph. It runs
on the paper's synthetic logits (supplement, "Further Details for the Analyses with Synthetic Data").
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.launches import count_launches
from benchmarks.losses import flops
from benchmarks.losses.flops import Counts
from benchmarks.timing import GRAPH_DEVICES, capture
from bucketrank import ap_loss, rank_sort_loss, use_backend
from bucketrank.losses.triton import unavailable_reason
from bucketrank.settings.choices import Backend, Method

LOSSES = {"ap": "AP", "rs": "RS"}
# Loss defaults, which are the paper's settings.
DELTAS = {"ap": 1.0, "rs": 0.5}
METHODS: dict[str, Method] = {
    "pairwise": "pairwise",
    "bucketed": "bucketed",
    "exact-torch": "exact",
    "exact-fused": "exact",
    "exact-triton": "exact",
}
BACKENDS: dict[str, Backend] = {"exact-torch": "torch", "exact-fused": "fused", "exact-triton": "triton"}
# A device runs at most one of them, by default.
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
    """Sum the sigmoid focal loss (alpha 0.25, gamma 2), computed as in its usual implementations."""
    p = torch.sigmoid(logits)
    p_t = p * targets + (1 - p) * (1 - targets)
    alpha_t = 0.25 * targets + 0.75 * (1 - targets)
    cross_entropy = binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (alpha_t * (1 - p_t) ** 2 * cross_entropy).sum()


SCORE_BASED: dict[str, LossFunction] = {"focal": focal_loss, "bce": binary_cross_entropy_with_logits}


_compiled: dict[tuple[str, str | None, int, torch.device], LossFunction] = {}


def loss_function(name: str, loss: str | None, max_positives: int | None = None) -> LossFunction:
    """Return the contender's loss as a function that returns a scalar; call it within its :func:`backend`."""
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
    """Return a context with the backend of the contender ``name``."""
    return use_backend(BACKENDS[name]) if name in BACKENDS else nullcontext()


def compiled_loss(name: str, loss: str | None, logits: Tensor) -> LossFunction:
    """Compile a contender's loss for logits like these, once for all steps."""
    key = name, loss, logits.numel(), logits.device
    if key not in _compiled:
        _compiled[key] = compile_alone(loss_function(name, loss))
    return _compiled[key]


def contender_names(device: str) -> list[str]:
    """List the baselines and methods for a device: the fused kernel for the CPU, Triton for others."""
    other = "exact-triton" if torch.device(device).type == "cpu" else "exact-fused"
    return [name for name in (*BASELINES, *METHODS) if name != other]


def why_unavailable(name: str, device: str) -> str | None:
    """Return the reason why the contender cannot run on this machine and device; None if it can."""
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
    """Build a function that runs the contender's forward and backward pass on ``data`` and returns the loss.

    The loss stays on the device, because reading it would be a device sync. ``sort`` has no loss and returns 0. A
    captured step ranks with a capacity (``max_positives``) of the positives in ``data``.
    """
    if name == "sort":
        return lambda: 0.0 * torch.sort(data.logits).values.numel()

    logits = data.logits.detach().clone().requires_grad_()
    # Make binary targets here, so that they are not timed with the score-based losses.
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
    """Count the floating-point operations of one step, by the rule in :mod:`benchmarks.losses.flops`."""
    size = counts.positives + counts.negatives
    if loss is not None:
        return flops.FORMULAS[loss, METHODS[name]](counts)
    return {"focal": flops.focal, "bce": flops.cross_entropy, "sort": flops.sort}[name](size)


Mode = Literal["eager", "compiled", "graph"]

LossFunction = Callable[[Tensor, Tensor], Tensor]  # (logits, targets) -> loss

# Compiling the definition does not pay off, and a sort has nothing to compile.
EAGER_ONLY = ("pairwise", "sort")
# Contenders without a device sync, given ``max_positives`` if they rank. The others cannot be captured.
CAPTURED = ("exact-triton", "focal", "bce")


def modes_of(name: str, device: str, *, compiled: bool) -> Iterator[Mode]:
    """Yield the modes of a contender on a device.

    >>> list(modes_of("focal", "cpu", compiled=True)), list(modes_of("sort", "cuda", compiled=True))
    (['eager', 'compiled'], ['eager'])

    On a GPU, eager focal loss is bound by its launches: the compiled one is the contender, and comes first.
    """
    modes: list[Mode] = ["eager"]
    if compiled and name not in EAGER_ONLY:
        modes.append("compiled")
    yield from reversed(modes) if name == "focal" and torch.device(device).type != "cpu" else modes
    if name in CAPTURED and torch.device(device).type in GRAPH_DEVICES:
        yield "graph"


def compile_alone(function: LossFunction) -> LossFunction:
    """Compile a function for one shape, as one graph, with its own cache.

    ``torch.compile`` caches by code object. A copy of the code has its own cache: the number of shapes and losses is
    not limited, and a call does not check the guards of the others first.
    """
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    compiled: LossFunction = torch.compile(own, fullgraph=True, dynamic=False)
    return compiled


class SyntheticLogits(NamedTuple):
    """Flat logits and their targets: the IoU label in (0, 1] of a positive, 0 for a negative, -1 for an ignored one."""

    logits: Tensor
    targets: Tensor

    def counts(self, delta: float) -> Counts:
        """Count P, M, N and B for the operation formulas."""
        positives = self.logits[self.targets > 0].sort().values
        negatives = self.logits[self.targets == 0]
        relevant = negatives[negatives >= positives[:1] - delta]
        sizes = torch.bincount(torch.searchsorted(positives, relevant, right=True))
        return Counts(positives.numel(), negatives.numel(), relevant.numel(), int(sizes.count_nonzero()))

    def thinned(self, positives: int) -> SyntheticLogits:
        """Keep only ``positives`` of the positives; the others are ignored.

        The lowest positive is kept, so the relevant negatives are the same.
        """
        index = (self.targets > 0).nonzero().squeeze(1)
        lowest = self.logits[index].argmin()
        index[[0, int(lowest)]] = index[[int(lowest), 0]]
        targets = self.targets.clone()
        targets[index[positives:]] = -1
        return SyntheticLogits(self.logits, targets)


def draw_logits(size: int, percent: float, *, seed: int, device: str = "cpu") -> SyntheticLogits:
    """Draw ``size`` logits in random order: ``percent`` positives from N(-1, 1), the negatives from N(1, 1).

    Labels are uniform on (0, 1]: a label of 0 would be a negative. At least one logit is positive.
    Numbers are drawn on the CPU, so they are the same on every device.

    >>> draw_logits(1000, 5.0, seed=0).counts(delta=1.0).positives
    50
    """
    if size < 2 or not 0 < percent < 100:
        raise ValueError(
            f"draw_logits: expected size >= 2 and 0 < percent < 100, got size {size} and percent {percent}"
        )
    generator = torch.Generator().manual_seed(seed)
    positives = min(max(round(size * percent / 100), 1), size - 1)
    logits = torch.randn(size, generator=generator)
    targets = torch.zeros(size)
    positions = torch.randperm(size, generator=generator)[:positives]
    targets[positions] = 1 - torch.rand(positives, generator=generator)
    logits += torch.where(targets > 0, -1.0, 1.0)
    return SyntheticLogits(logits.to(device), targets.to(device))


LAUNCHES_RULE = (
    "torch operations other than views and allocations, and Triton kernels, in one step; host waits are operations"
    " whose result the host has to read. Replaying a CUDA graph is one launch. Compiled code and the fused CPU kernel"
    " are not counted. The tables leave out those of the CPU, where the losses run other operations than on a GPU"
)


class StepLaunches(NamedTuple):
    """Launches and device syncs of a step; None if they cannot be counted."""

    launches: int | None = None
    waits: int | None = None


def is_counted(name: str, mode: Mode) -> bool:
    """Return whether the launches of a contender are counted by running a step."""
    return mode == "eager" and name != "exact-fused"


def step_launches(name: str, loss: str | None, data: SyntheticLogits, mode: Mode) -> StepLaunches:
    """Run a step of the contender and count; a captured step is one launch without a wait."""
    if mode == "graph":
        return StepLaunches(1, 0)
    if not is_counted(name, mode):
        return StepLaunches()
    step = loss_step(name, loss, data)
    with count_launches() as counted:
        step()
    return StepLaunches(counted.launches, counted.waits)
