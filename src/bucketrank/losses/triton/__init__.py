"""The Triton kernels of ``method="exact"``, for CUDA and ROCm devices.

Importing this package does not import Triton, which takes half a second. :func:`unavailable_reason` tells whether the
kernels can run on a device. ``rank_with_triton`` ranks and prepares the gradient; ``docs/gpu.md`` explains the steps.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch

from bucketrank.errors import first_line
from bucketrank.lazy import import_on_use

if TYPE_CHECKING:
    from bucketrank.losses.triton.ranking import rank_with_triton as rank_with_triton
    from bucketrank.losses.triton.ranking import resume_ranking as resume_ranking
    from bucketrank.losses.triton.ranking import state_sizes as state_sizes

_lazy, __getattr__ = import_on_use(
    __name__, {"bucketrank.losses.triton.ranking": "rank_with_triton resume_ranking state_sizes"}
)

# Triton of torch 2.6, the oldest torch that bucketrank supports.
OLDEST_TRITON = (3, 2)
# The oldest NVIDIA generation for which the kernels compile (Volta).
OLDEST_CAPABILITY = (7, 0)
# Called with the name of each kernel that is launched; tests and benchmarks count them.
kernel_observers: list[Callable[[str], None]] = []


@cache
def unavailable_reason(device: torch.device) -> str | None:
    """Return the reason, in one sentence, why the Triton kernels cannot run on ``device``; None if they can.

    The first call for a device runs a tiny kernel on it: Triton may be installed and still lack a C compiler, the
    compiler of the device, or a driver that it knows.
    """
    if device.type != "cuda":
        return f"The Triton kernels run on CUDA and ROCm devices, not on {device.type}."
    return import_problem() or _capability_problem(device) or _launch_problem(device)


@cache
def import_problem() -> str | None:
    """Return the reason why Triton cannot be imported; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed."
    try:
        import triton
    except Exception as error:  # noqa: BLE001  a broken installation raises anything; the torch operations still work
        return f"Triton cannot be imported: {_sentence(error)}"
    if tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) < OLDEST_TRITON:
        return f"The kernels need Triton {'.'.join(map(str, OLDEST_TRITON))} or newer, got {triton.__version__}."
    return None


def _capability_problem(device: torch.device) -> str | None:
    if torch.version.hip is not None or (capability := torch.cuda.get_device_capability(device)) >= OLDEST_CAPABILITY:
        return None
    return "The kernels need an NVIDIA GPU of compute capability {}.{} or higher, got {}.{}.".format(
        *OLDEST_CAPABILITY, *capability
    )


def _launch_problem(device: torch.device) -> str | None:
    """Compile and launch a minimal kernel, without a device sync."""
    from torch.utils._python_dispatch import _disable_current_modes

    try:
        from bucketrank.losses.triton.launch import probe

        with _disable_current_modes():  # torch.compile calls this while tracing with fake tensors
            probe(device)
    except Exception as error:  # noqa: BLE001  missing compilers and drivers raise anything
        return f"Triton cannot run a kernel on {device}: {_sentence(error)}"
    return None


def _sentence(error: Exception) -> str:
    """Describe the error in a sentence."""
    text = first_line(error)
    return text if text.endswith(".") else f"{text}."
