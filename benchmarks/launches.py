"""Count kernel launches and device syncs. Needs no GPU; also used by tests.

On a GPU, every operation costs the host a launch of 5 to 10 microseconds, even if it is small. Reading a value from the
device is a device sync: the host waits until the device is idle. The CPU runs the same operations, so both can be
counted there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bucketrank.losses.triton import kernel_observers

# Operations whose result, often its size, depends on values on the device, so the host has to read them.
_WAITING = {"nonzero", "_local_scalar_dense", "is_nonzero", "equal", "bincount", "masked_select", "histc"}
_WAITING |= {"_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
# Operations that only reserve memory; they launch nothing.
_ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Methods that read a CPU tensor without an operation, so only a function mode sees them.
_READING = {Tensor.tolist: "tolist", Tensor.cpu: "cpu", Tensor.numpy: "numpy"}


class Launches:
    """Counted operations and kernels by name; views are left out, allocations are counted separately."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.allocations: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()

    def add_kernel(self, name: str) -> None:
        """Count the launch of a custom kernel."""
        self.kernels[name] += 1

    @property
    def launches(self) -> int:
        """The number of operations and kernels."""
        return self.operations.total() + self.kernels.total()

    @property
    def waits(self) -> int:
        """The number of device syncs that a GPU would have."""
        return self.waiting.total()


@contextmanager
def count_launches() -> Iterator[Launches]:
    """Count torch operations and our kernels inside a ``with`` block, and the device syncs they would cost on a GPU.

    >>> with count_launches() as counted:
    ...     _ = (torch.ones(3) + 1).view(3, 1).sum().item()
    >>> dict(counted.operations), counted.waits
    ({'ones': 1, 'add': 1, 'sum': 1, '_local_scalar_dense': 1}, 1)
    """
    counted = Launches()
    kernel_observers.append(counted.add_kernel)
    try:
        with _ReadingMode(counted), _OperationMode(counted):
            yield counted
    finally:
        kernel_observers.remove(counted.add_kernel)


class _OperationMode(TorchDispatchMode):
    def __init__(self, counted: Launches) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        aliases = [result.alias_info for result in func._schema.returns]
        if not any(alias is not None and not alias.is_write for alias in aliases):  # no view
            (self.counted.allocations if name in _ALLOCATING else self.counted.operations)[name] += 1
        result = func(*args, **kwargs)
        if _waits(name, args, kwargs, result):
            self.counted.waiting[name] += 1
        return result


class _ReadingMode(TorchFunctionMode):
    def __init__(self, counted: Launches) -> None:
        super().__init__()
        self.counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING and args[0].device.type == "cpu":
            self.counted.waiting[_READING[func]] += 1
        return func(*args, **(kwargs or {}))


def _waits(name: str, args: Any, kwargs: Any, result: Any) -> bool:
    if name in _WAITING:
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_"):  # the True entries of a boolean mask have to be counted
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name in ("_to_copy", "copy_"):
        source = args[1] if name == "copy_" else args[0]
        non_blocking = kwargs.get("non_blocking", len(args) > 2 and name == "copy_" and args[2])
        return bool(source.device.type != result.device.type and not non_blocking)
    return False
