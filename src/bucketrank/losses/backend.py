"""The class that implements each method: on the CPU the fused kernels if numba is installed, else torch operations."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import get_args

from torch import Tensor

from bucketrank.choices import Backend
from bucketrank.losses.bucketed import Bucketed
from bucketrank.losses.comparison import Comparison
from bucketrank.losses.exact import Exact
from bucketrank.losses.pairwise import Pairwise

METHODS: dict[str, type[Comparison]] = {"exact": Exact, "bucketed": Bucketed, "pairwise": Pairwise}
BACKENDS: tuple[Backend, ...] = get_args(Backend)

_backend: Backend = "auto"


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Force the implementation of ``method="exact"`` inside a ``with`` block, in the whole process.

    Meant for tests and benchmarks. ``"fused"`` is the numba kernel, for CPU tensors; ``"torch"`` is plain torch
    operations; ``"auto"`` chooses.

    >>> import torch
    >>> from bucketrank import ap_loss, use_backend
    >>> with use_backend("torch"):
    ...     ap_loss(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0]), delta=0)
    tensor(0.5000)
    """
    global _backend
    if name not in BACKENDS:
        raise ValueError(f"use_backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    if name == "fused" and not _has_numba():
        raise ImportError('use_backend: "fused" needs numba; install it with: pip install "bucketrank[fast]"')
    previous, _backend = _backend, name
    try:
        yield
    finally:
        _backend = previous


@cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@cache
def _fused() -> type[Comparison]:
    # Imported when first needed: numba takes half a second to import, and losses on a GPU never need it.
    from bucketrank.losses.fused import Fused

    return Fused


def chosen_backend() -> Backend:
    """Return the backend that :func:`use_backend` has set."""
    return _backend


def comparison_of(method: str, backend: str, logits: Tensor) -> type[Comparison]:
    """Return the class that compares these logits by this method."""
    if method == "exact" and backend != "torch":
        if logits.device.type == "cpu" and _has_numba():
            return _fused()
        if backend == "fused":
            raise ValueError(f"use_backend: the fused kernel takes CPU tensors, got one on {logits.device}")
    return METHODS[method]
