"""A device for Triton without a GPU: kernels are compiled for a real target, and their PTX is interpreted.

Everything from the call of a kernel to its launch is Triton's own code: specialisation, compilation, caches. Only the
driver, which would load the binary and start it, is replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from .program import Execution, Program


class Device:
    """An emulated NVIDIA GPU, and a record of what its kernels did."""

    def __init__(self, capability: int, *, seed: int = 1) -> None:
        self.capability = capability
        # Every launch draws another interleaving from this number.
        self.seed = seed
        self.launches: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.atomics: Counter[str] = Counter()
        self.executions: list[tuple[str, Execution]] = []

    def execute(self, kernel: CompiledKernel, blocks: int, values: tuple[Any, ...]) -> None:
        """Run ``blocks`` blocks of a kernel; ``values`` are its arguments."""
        types: dict[str, str] = kernel.src.signature
        names = [name for name, kind in types.items() if kind != "constexpr"]
        if len(values) == len(types):  # since Triton 3.3 also the constants are passed
            values = tuple(value for value, kind in zip(values, types.values(), strict=True) if kind != "constexpr")
        self.seed = self.seed * 6364136223846793005 % (1 << 62) + 1
        done = _decode(kernel).run(blocks, dict(zip(names, values, strict=True)), seed=self.seed)
        self.launches[kernel.name] += 1
        self.steps[kernel.name] += done.steps
        self.atomics[kernel.name] += done.atomics
        self.executions.append((kernel.name, done))

    def bytes_moved(self, argument: str) -> tuple[int, int]:
        """Return how many bytes of an argument the kernels have loaded and stored."""
        done = [execution for _, execution in self.executions]
        return sum(one.loaded.get(argument, 0) for one in done), sum(one.stored.get(argument, 0) for one in done)


class IdleDevice(Device):
    """A device whose kernels do nothing: what is left is the time of the host."""

    def execute(self, kernel: CompiledKernel, blocks: int, values: tuple[Any, ...]) -> None:
        pass


_programs: dict[str, Program] = {}


def _decode(kernel: CompiledKernel) -> Program:
    if kernel.hash not in _programs:
        metadata = kernel.metadata
        _programs[kernel.hash] = Program(kernel.asm["ptx"], shared_bytes=metadata.shared, warps=metadata.num_warps)
    return _programs[kernel.hash]


class _Driver:
    """The part of a Triton driver that launches need."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.device.capability, 32)

    def get_current_device(self) -> int:
        # Triton keeps the compiled kernels of each device. No real device has such a number.
        return 1000 + self.device.capability

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _keep(_kernel: CompiledKernel) -> None:
    """Unload nothing: nothing was loaded."""


def _init_handles(kernel: CompiledKernel) -> None:
    if kernel.module is None:
        kernel.module = kernel.function = 0
        # Until Triton 3.4 the launcher was a plain attribute.
        name = "_run" if isinstance(getattr(CompiledKernel, "run", None), property) else "run"
        setattr(kernel, name, partial(_launch, kernel))


def _launch(kernel: CompiledKernel, x: int, y: int, z: int, *rest: Any) -> None:
    """Launch with the arguments of Triton's own launchers, of which six come before those of the kernel."""
    driver.active.device.execute(kernel, x * y * z, rest[6:])


@contextmanager
def emulate(capability: int = 80, *, seed: int = 1, device: Device | None = None) -> Iterator[Device]:
    """Make Triton launch on an emulated device inside a ``with`` block."""
    device = device or Device(capability, seed=seed)
    with (
        mock.patch.object(driver, "_active" if hasattr(driver, "_active") else "active", _Driver(device)),
        mock.patch.object(CompiledKernel, "_init_handles", _init_handles),
        mock.patch.object(CompiledKernel, "__del__", _keep, create=True),
    ):
        yield device
