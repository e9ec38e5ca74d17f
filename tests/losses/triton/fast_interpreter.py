"""Triton's interpreter without its repeated work. Every operation of every kernel is still executed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

entry_by_entry = interpreter.ScanOps.generic_scan


@contextmanager
def fast_interpreter() -> Iterator[None]:
    """Run kernels in less than half the time.

    Triton's interpreter replaces the functions of its language whenever a function is called, creates a table of dtypes
    whenever it looks one up, and scans a block entry by entry. It also computes integers a second time, in int64, for
    an assertion that it executes in debug mode only. A version of Triton without one of these keeps its own way.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, wrap in (("_patch_lang", _once_per_module), ("_get_np_dtype", _once_per_dtype)):
            if hasattr(interpreter, name):
                patch.setattr(interpreter, name, wrap(getattr(interpreter, name)))
        patch.setattr(interpreter.ScanOps, "generic_scan", scan_by_doubling)
        builder = interpreter.interpreter_builder
        if hasattr(builder.options, "sanitize_overflow"):
            patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield


def _once_per_module(prepare_language: Callable[[Any], Any]) -> Callable[[Any], Any]:
    prepared: set[str] = set()

    def prepare(function: Any) -> Any:
        if function.__module__ not in prepared:
            prepare_language(function)
            prepared.add(function.__module__)
        return SimpleNamespace(restore=lambda: None)  # newer versions of Triton restore the language after a kernel

    return prepare


def _once_per_dtype(to_numpy: Callable[[Any], Any]) -> Callable[[Any], Any]:
    table: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name  # the dtype of a block cannot be hashed
        if name not in table:
            table[name] = to_numpy(dtype)
        return table[name]

    return look_up


def scan_by_doubling(scan: Any, inputs: Any) -> list[Any]:
    """Scan blocks of one dimension by log2(size) calls of the combining function on whole blocks, as a GPU does."""
    values = list(inputs)
    (size,) = values[0].handle.data.shape
    distance = 1
    while distance < size:
        earlier = [scan.to_tensor(np.roll(value.handle.data, distance), value.dtype) for value in values]
        combined = scan.combine_fn.fn(*earlier, *values)
        has_earlier = np.arange(size) >= distance
        values = [
            scan.to_tensor(np.where(has_earlier, after.handle.data, before.handle.data), before.dtype)
            for before, after in zip(values, combined if isinstance(combined, tuple) else (combined,), strict=True)
        ]
        distance *= 2
    return values
