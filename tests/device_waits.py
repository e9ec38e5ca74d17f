"""Make every wait of the host for a GPU an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise if the host waits for the GPU inside a ``with`` block."""
    try:
        _set_mode("error")
        yield
    finally:
        _set_mode("default")


def _set_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode is a prototype, and warnings are errors here
        torch.cuda.set_sync_debug_mode(mode)
