"""Backend selection: fused kernels on the CPU, Triton kernels on a GPU, else torch operations."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import get_args

from torch import Tensor

from bucketrank.losses import triton
from bucketrank.losses.comparison import Comparison, TorchComparison
from bucketrank.losses.exact import Exact
from bucketrank.losses.pairwise import Bucketed, Pairwise
from bucketrank.settings.choices import Backend

METHODS: dict[str, type[TorchComparison]] = {"exact": Exact, "bucketed": Bucketed, "pairwise": Pairwise}
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# Device types that Triton supports; "cuda" includes ROCm.
TRITON_DEVICES = ("cuda", "xpu")

logger = logging.getLogger(__name__)

_backend: Backend = "auto"


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Force the implementation ``name`` of ``method="exact"`` inside a ``with`` block, in the whole process.

    Meant for tests and benchmarks. ``"fused"`` is the numba kernel, for CPU tensors; ``"triton"`` are the GPU kernels;
    ``"torch"`` is plain torch operations; ``"auto"`` chooses.

    >>> import torch
    >>> from bucketrank import ap_loss, use_backend
    >>> with use_backend("torch"):
    ...     ap_loss(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0]), delta=0)
    tensor(0.5000)
    """
    global _backend
    if name not in BACKENDS:
        raise ValueError(f"use_backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    if name == "fused" and isinstance(fused := _fused(), str):
        raise ImportError(f'use_backend: "fused" needs numba (pip install "bucketrank[fast]"): {fused}')
    if name == "triton" and (reason := triton.import_problem()):
        raise ImportError(f'use_backend: "triton" needs Triton, which comes with torch on Linux: {reason}')
    previous, _backend = _backend, name
    try:
        yield
    finally:
        _backend = previous


@cache
def _fused() -> type[Comparison] | str:
    """Import the fused kernel, or return the reason why not, and log it if numba is installed."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    try:
        # Import lazily: numba takes half a second to import, and losses on a GPU never need it.
        from bucketrank.losses.fused import Fused
    except ImportError as error:
        reason = f"numba cannot be imported: {error}"
        logger.warning("ranking losses use torch operations instead of the fused kernel: %s", reason)
        return reason
    return Fused


@cache
def _log_once(message: str) -> None:
    logger.warning(message)


def triton_for(method: str, backend: str, logits: Tensor) -> ModuleType | None:
    """Return the package of the Triton kernels if they rank these logits.

    If they could be used on such a device but not here, log the reason once; with ``use_backend("triton")``, raise it.
    """
    device = logits.device
    is_forced = backend == "triton"
    if method != "exact" or not (is_forced or (backend == "auto" and device.type in TRITON_DEVICES)):
        return None
    reason = triton.unavailable_reason(device)
    if reason is None:
        return triton
    if is_forced:
        raise ValueError(f"use_backend: the Triton kernels cannot rank tensors on {device}: {reason}")
    _log_once(f"ranking losses on {device.type} use torch operations instead of Triton kernels: {reason}")
    return None


def chosen_backend() -> Backend:
    """Return the backend that :func:`use_backend` has set."""
    return _backend


def ranks_fused(method: str, backend: str, device: str) -> bool:
    """Return whether the fused kernel ranks logits on such a device; torch.compile asks while it traces."""
    return method == "exact" and backend in ("auto", "fused") and device == "cpu" and not isinstance(_fused(), str)


# What torch.compiler.assume_constant_result does, which would import all of torch.compile, and Triton with it.
ranks_fused._dynamo_marked_constant = True  # type: ignore[attr-defined]


def comparison_of(method: str, backend: str, logits: Tensor) -> type[Comparison]:
    """Return the class that compares these logits by this method."""
    if method == "exact" and backend != "torch":
        if logits.device.type == "cpu" and not isinstance(fused := _fused(), str):
            return fused
        if backend == "fused":
            raise ValueError(f"use_backend: the fused kernel takes CPU tensors, got one on {logits.device}")
    return METHODS[method]
