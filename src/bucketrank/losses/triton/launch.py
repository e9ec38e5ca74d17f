"""Launches of the Triton kernels, and the memory that they share."""

from __future__ import annotations

import re
import struct
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from bucketrank.launches import record_kernel

# Bytes: Triton loads aligned pointers in wider pieces.
ALIGNMENT = 16
# Kernels, compiled, by name and variant.
_compiled: dict[Hashable, Any] = {}
# Since this version of Triton a launch also passes the constants, which it ignores.
_CONSTANTS_ARE_PASSED = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) >= (3, 3)


class Launcher:
    """Launches kernels on the current device and stream.

    Triton's own launch costs the host about 10 microseconds, most of them to find out which variant of the kernel the
    arguments need. ``variant`` says that: two launches with the same variant and the same constants must have
    arguments of the same types and the same alignment. Integer arguments are not specialised (``do_not_specialize``).
    """

    def __init__(self, variant: Hashable) -> None:
        device = driver.active.get_current_device()
        self.variant = device, variant
        self.stream = driver.active.get_current_stream(device)

    def __call__(self, kernel: Any, programs: int, *arguments: Any, warps: int = 4, **constants: Any) -> None:
        """Start ``programs`` programs of ``kernel``; do nothing if there are none."""
        if programs == 0:
            return
        record_kernel(kernel.__name__)
        values = tuple(constants.values())
        key = kernel.__name__, warps, values, self.variant
        compiled = _compiled.get(key)
        if compiled is None or _has_hooks():
            # No multiplication is fused with an addition: exact_sum() needs each rounding.
            _compiled[key] = kernel[(programs,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)
            return
        settings = programs, 1, 1, self.stream, compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(*settings, *arguments, *(values if _CONSTANTS_ARE_PASSED else ()))


@triton.jit
def _write_one(result):
    """Write 1."""
    tl.store(result, 1)


def probe(device: torch.device) -> None:
    """Compile and launch a kernel on ``device``; raise if anything is missing."""
    with on_device(device):
        _write_one[(1,)](torch.zeros(1, dtype=torch.int32, device=device))


def _has_hooks() -> bool:
    """Whether a profiler listens to Triton's launches; it hears only of those that Triton makes itself."""
    knobs = getattr(triton, "knobs", None)
    return knobs is not None and bool(knobs.runtime.launch_enter_hook or knobs.runtime.launch_exit_hook)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which Triton launches on ``device``: it launches on the current device of torch."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def is_aligned(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Return which tensors begin at an address that Triton calls aligned."""
    return tuple(tensor is None or tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def float64_bits(value: float) -> int:
    """Return the bits of ``value``. Triton passes a float argument as float32, an integer without loss."""
    return int.from_bytes(struct.pack("<d", value), "little", signed=True)


class Layout:
    """The division of one piece of memory into arrays: one allocation and one launch instead of many.

    ``sizes`` has the number of entries and the dtype of each array. Arrays of one dtype lie side by side.
    """

    def __init__(self, sizes: Iterable[tuple[int, torch.dtype]]) -> None:
        sizes = list(sizes)
        dtypes = list(dict.fromkeys(dtype for _, dtype in sizes))
        self.parts = []  # of each dtype: bytes, padded lengths, positions in the result
        for dtype in dtypes:
            own = [k for k, (_, other) in enumerate(sizes) if other == dtype]
            step = ALIGNMENT // dtype.itemsize
            lengths = [-(-sizes[k][0] // step) * step for k in own]
            self.parts.append((dtype, sum(lengths) * dtype.itemsize, lengths, own))
        self.count = len(sizes)
        self.bytes = sum(size for _, size, _, _ in self.parts)

    def allocate(self, device: torch.device) -> Tensor:
        """Return zeros of the right size."""
        return torch.zeros(self.bytes, dtype=torch.uint8, device=device)

    def divide(self, memory: Tensor) -> list[Tensor]:
        """Return the arrays, views of ``memory``; each may be a few entries longer than asked for."""
        arrays: list[Any] = [None] * self.count
        pieces = memory.split_with_sizes([size for _, size, _, _ in self.parts])
        for piece, (dtype, _, lengths, own) in zip(pieces, self.parts, strict=True):
            for position, array in zip(own, piece.view(dtype).split_with_sizes(lengths), strict=True):
                arrays[position] = array
        return arrays
