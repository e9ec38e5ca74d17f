"""Durations as text."""

from __future__ import annotations


def duration_in_words(seconds: float) -> str:
    """Return a duration as text.

    >>> duration_in_words(42), duration_in_words(75), duration_in_words(3 * 3600 + 120)
    ('42 s', '1 min 15 s', '3 h 2 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
