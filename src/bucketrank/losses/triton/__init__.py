"""The Triton kernels of ``method="exact"``, for CUDA and ROCm devices.

Importing this package does not import Triton. :func:`unavailable_reason` says whether the kernels can run on a device.
:func:`rank_with_triton` ranks and prepares the gradient; ``docs/gpu.md`` explains the steps.
"""

from __future__ import annotations

import importlib.util
import os
import re
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bucketrank.losses.triton.ranking import TritonRanking as TritonRanking

# Triton of torch 2.6, the oldest torch that bucketrank supports.
OLDEST_TRITON = (3, 2)
# The oldest NVIDIA generation for which the kernels compile (Volta).
OLDEST_CAPABILITY = (7, 0)


def unavailable_reason(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on ``device``, in one sentence, or None if they can."""
    if device.type not in ("cpu", "cuda"):
        return f"The Triton kernels run on CUDA and ROCm devices, not on {device.type}."
    if device.type == "cpu" and not _is_interpreted():
        return "The Triton kernels run on CUDA and ROCm devices; on the CPU only in Triton's interpreter."
    reason = _triton_problem()
    if reason is None and device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CAPABILITY:
            return "The kernels need an NVIDIA GPU of compute capability {}.{} or higher, got {}.{}.".format(
                *OLDEST_CAPABILITY, *capability
            )
    return reason


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def _triton_problem() -> str | None:
    """Return why Triton cannot be used in this process, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed."
    try:
        import triton
    except Exception as error:  # noqa: BLE001  a broken installation raises anything; the torch operations still work
        return f"Triton cannot be imported: {error}."
    if tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) < OLDEST_TRITON:
        return f"The kernels need Triton {'.'.join(map(str, OLDEST_TRITON))} or newer, got {triton.__version__}."
    return None


def rank_with_triton(
    logits: Tensor,
    targets: Tensor,
    localisation: Tensor | None,
    *,
    loss: str,
    delta: float,
    sizes: tuple[int, ...],
    max_positives: int | None,
) -> tuple[Tensor, Tensor | None, TritonRanking]:
    """Return the one or two values of a ranking loss, one per ranking, and the state of the backward pass.

    ``logits`` and ``targets`` are flat, contiguous and of one dtype, float32 or float64. Ranking g is their g-th
    consecutive slice, of length ``sizes[g]``. ``localisation`` (aLRP) holds one error per positive, in the order of
    ``logits[targets > 0]``. ``loss`` is a name in ``RANKING_LOSSES``.

    Without ``max_positives`` the host waits once, for the number of positives. With it the host does not wait.
    ``max_positives`` is the capacity of the whole call. With more positives, every value is NaN.
    """
    # Imported when first needed: importing Triton takes half a second, and CPU tensors never need it.
    from bucketrank.losses.triton.ranking import TritonRanking

    return TritonRanking.compute(
        logits, targets, localisation, loss=loss, delta=delta, sizes=sizes, max_positives=max_positives
    )
