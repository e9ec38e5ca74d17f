"""The one function through which every Triton kernel is launched."""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from bucketrank.launches import record_kernel

# Limits between which 2 delta and its inverse are ordinary float64 numbers.
SMALLEST_DELTA, LARGEST_DELTA = 1e-290, 1e290
# Limits between which float32 can take their place.
SMALLEST_FLOAT32_DELTA, LARGEST_FLOAT32_DELTA = 1e-30, 1e30


def launch(kernel: Any, programs: int, *arguments: Any, warps: int = 4, **constants: Any) -> None:
    """Start ``programs`` programs of ``kernel``; do nothing if there are none.

    No multiplication is fused with an addition: the exact differences of ``device_functions.py`` need each rounding.
    """
    if programs == 0:
        return
    record_kernel(kernel.__name__)
    kernel[(programs,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which Triton launches on ``device``: it launches on the current device of torch."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def float64_bits(value: float) -> int:
    """Return the bits of ``value``. Triton passes a float argument as float32, an integer without loss."""
    return int.from_bytes(struct.pack("<d", value), "little", signed=True)
