"""The number of threads of torch in tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run torch on ``count`` threads inside a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run the test on one thread of torch: small tensors are faster, and sums have the same bits."""
    with torch_threads(1):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Run the test on two threads of torch."""
    with torch_threads(2):
        yield
