"""Which implementation answers for a method: on CPU the fused kernel where numba is installed, torch ops elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from torch import Tensor

from bucketrank.losses.bucketed import Bucketed
from bucketrank.losses.comparison import Comparison
from bucketrank.losses.exact import Exact
from bucketrank.losses.pairwise import Pairwise

METHODS: dict[str, type[Comparison]] = {"pairwise": Pairwise, "bucketed": Bucketed, "exact": Exact}
BACKENDS = ("auto", "fused", "torch")

_backend = "auto"


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force the implementation of ``method="exact"`` inside a ``with``: for tests and benchmarks; process-wide.

    ``"fused"`` is the numba kernel, for CPU tensors; ``"torch"`` is plain torch ops; ``"auto"`` chooses.

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
    # Imported when first needed: numba takes half a second, and who only has a GPU never needs it.
    from bucketrank.losses.fused import Fused

    return Fused


def chosen_backend() -> str:
    """What :func:`use_backend` says now."""
    return _backend


def comparison_of(method: str, backend: str, logits: Tensor) -> type[Comparison]:
    """The class that compares these logits by this method."""
    if method != "exact" or backend == "torch":
        return METHODS[method]
    if logits.device.type == "cpu" and _has_numba():
        return _fused()
    if backend == "fused":
        raise ValueError(f"use_backend: the fused kernel takes CPU tensors, got one on {logits.device}")
    return METHODS[method]
