"""Checks of numbers that callers pass as settings."""

from __future__ import annotations

import sys
from typing import TypeGuard

LARGEST = sys.float_info.max
# repr fails for integers beyond a few thousand digits.
MAX_PRINTED_BITS = 128


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is an int or float, not a bool, that float64 can hold.

    Compared instead of math.isfinite, which torch.compile cannot trace for a number that changes between calls, and
    which raises OverflowError for a very large integer.
    """
    return not isinstance(value, bool) and isinstance(value, (int, float)) and -LARGEST <= value <= LARGEST


def format_value(value: object) -> str:
    """Return ``repr(value)``, or the size of an integer with too many digits to print."""
    if isinstance(value, int) and value.bit_length() > MAX_PRINTED_BITS:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)
