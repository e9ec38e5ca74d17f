"""Sizes, durations, bytes and counts with units, for tables and figures."""

from __future__ import annotations

import math

UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "K"))
DURATIONS = ((60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def size_in_words(n: int) -> str:
    """Return a number of logits with a unit.

    >>> size_in_words(10_000), size_in_words(1_500_000), size_in_words(640)
    ('10K', '1.5M', '640')
    """
    return next((f"{n / unit:.12g}{letter}" for unit, letter in UNITS if n >= unit), str(n))


def parse_size(text: str) -> int:
    """Return the number of logits written like :func:`size_in_words` does.

    >>> parse_size("10K"), parse_size("1.5M"), parse_size("640")
    (10000, 1500000, 640)
    """
    for unit, letter in UNITS:
        if text.strip().upper().endswith(letter):
            return round(float(text.strip()[:-1]) * unit)
    return int(text)


def significant(x: float) -> str:
    """Return ``x`` with three significant digits and without an exponent.

    >>> significant(0.01234), significant(1.0), significant(98.7654), significant(1234.5)
    ('0.0123', '1.00', '98.8', '1,230')
    """
    x = float(f"{x:.2e}")
    return f"{x:,.{max(0, 2 - math.floor(math.log10(abs(x))))}f}" if x else "0"


def seconds_in_words(seconds: float, *others: float) -> str:
    """Return a duration with a unit, followed by ``others`` in brackets in the same unit.

    >>> seconds_in_words(0.0456), seconds_in_words(400), seconds_in_words(0.0009999), seconds_in_words(2.5, 2.4, 2.6)
    ('45.6 ms', '6.67 min', '1.00 ms', '2.50 s [2.40, 2.60]')
    """
    seconds = float(f"{seconds:.2e}")  # 999.9 µs are 1 ms
    unit, name = next((u for u in DURATIONS if seconds >= u[0]), DURATIONS[-1])
    # 84 s is easier to read than 1.4 min.
    unit, name = (1.0, "s") if name == "min" and seconds < 120 else (unit, name)
    brackets = f" [{', '.join(significant(other / unit) for other in others)}]" if others else ""
    return f"{significant(seconds / unit)} {name}{brackets}"


def bytes_in_words(n: int) -> str:
    """Return an amount of memory with a unit.

    >>> bytes_in_words(123_456), bytes_in_words(12_345_678)
    ('123 KB', '12.3 MB')
    """
    return next((f"{significant(n / unit)} {letter}B" for unit, letter in UNITS if n >= unit), f"{n} B")


def count_in_words(n: int) -> str:
    """Return a number of operations with a unit.

    >>> count_in_words(76_000_000), count_in_words(900)
    ('76.0M', '900')
    """
    return next((f"{significant(n / unit)}{letter}" for unit, letter in UNITS if n >= unit), str(n))
