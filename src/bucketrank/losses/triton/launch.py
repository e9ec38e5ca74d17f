"""Launches of the Triton kernels."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

from bucketrank.losses.triton import kernel_observers

logger = logging.getLogger(__name__)

# Alignment in bytes: Triton uses wider loads for aligned pointers.
ALIGNMENT = 16
# Compiled kernels by name and variant.
_compiled: dict[Hashable, Any] = {}
# In older Triton versions the hooks, which profilers set, are attributes of the compiled kernel class.
_HAS_KNOBS = hasattr(triton, "knobs")
# Since this version of Triton a launch also passes the constants, which it ignores.
_CONSTANTS_ARE_PASSED = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) >= (3, 3)


class Launcher:
    """Launches kernels on the current device and stream.

    Triton's own launch costs the host about 10 microseconds, mostly to select the kernel variant for the arguments.
    ``variant`` replaces this: two launches with the same variant and the same constants must have
    arguments of the same types and the same alignment. Integer arguments are not specialised (``do_not_specialize``).

    The attributes of compiled kernels belong to Triton's internals. If a version of Triton has others, all launches go
    through Triton.
    """

    is_direct = True

    def __init__(self, variant: Hashable) -> None:
        device = driver.active.get_current_device()
        self.variant = device, variant
        self.stream = driver.active.get_current_stream(device)

    def __call__(self, kernel: Any, programs: int, *arguments: Any, warps: int = 4, **constants: Any) -> None:
        """Start ``programs`` programs of ``kernel``; do nothing if there are none."""
        if programs == 0:
            return
        for observe in kernel_observers:
            observe(kernel.__name__)
        values = tuple(constants.values())
        key = kernel.__name__, warps, values, self.variant
        compiled = _compiled.get(key) if self.is_direct else None
        if compiled is not None and not _has_hooks():
            try:
                settings = programs, 1, 1, self.stream, compiled.function, compiled.packed_metadata, None, None, None
                compiled.run(*settings, *arguments, *(values if _CONSTANTS_ARE_PASSED else ()))
            except (AttributeError, TypeError) as error:  # nothing was launched
                Launcher.is_direct = False
                logger.warning(
                    "Triton %s launches kernels in another way (%s): its slower launcher is used",
                    triton.__version__,
                    error,
                )
            else:
                return
        # No multiplication is fused with an addition: exact_sum() needs each rounding.
        _compiled[key] = kernel[(programs,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)


@triton.jit
def _write_one(result):  # type: ignore[no-untyped-def]
    """Write 1."""
    tl.store(result, 1)


def probe(device: torch.device) -> None:
    """Compile and launch a kernel on ``device``; raise if anything is missing."""
    with on_device(device):
        _write_one[(1,)](torch.zeros(1, dtype=torch.int32, device=device))


def _has_hooks() -> bool:
    """Whether a profiler hooks into Triton's launches; it only sees launches made by Triton itself."""
    runtime = triton.knobs.runtime if _HAS_KNOBS else CompiledKernel
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` current within a context, because Triton launches on torch's current device."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def is_aligned(*tensors: Tensor) -> tuple[bool, ...]:
    """Return for each tensor whether Triton considers its address aligned."""
    return tuple(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def float64_bits(value: float) -> int:
    """Return the bits of ``value``. Triton passes a float argument as float32, an integer without loss."""
    return int.from_bytes(struct.pack("<d", value), "little", signed=True)
