"""The interpreter without its repeated work computes what Triton's own computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import ScanOps

from .fast_interpreter import entry_by_entry, scan_by_doubling


@triton.jit
def later_unless_zero(earlier, later):
    """Return ``later``, or ``earlier`` where ``later`` is 0: associative, and another value if swapped."""
    return tl.where(later == 0, earlier, later)


@triton.jit
def last_nonzero(entries, result, SIZE: tl.constexpr):  # noqa: N803 (Triton's constants are capitals)
    """Write the last entry up to each position that is not 0."""
    lanes = tl.arange(0, SIZE)
    scanned = tl.associative_scan(tl.load(entries + lanes), 0, later_unless_zero)
    tl.store(result + lanes, scanned)


@pytest.mark.parametrize("scan", [entry_by_entry, scan_by_doubling])
def test_a_scan_goes_from_the_first_entry_to_the_last(
    scan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScanOps, "generic_scan", scan)
    entries = torch.tensor([0.0, 3.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0])
    result = torch.empty(8)
    last_nonzero[(1,)](entries, result, SIZE=8)
    assert result.tolist() == [0, 3, 3, 3, 5, 5, 5, 5]
