"""The known name closest to a mistyped one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word most like ``word``, as part of a sentence.

    A word that is the last part of a dotted name means that name: ``--lr`` means ``--schedule.lr``.

    >>> nearest("dleta", ["delta", "method"])
    'the nearest is "delta"'
    """

    def likeness(name: str) -> float:
        last_part = "--" + name.rpartition(".")[2] if name.startswith("--") and "." in name else name
        return max(difflib.SequenceMatcher(None, word, each).ratio() for each in (name, last_part))

    return f'the nearest is "{max(known, key=likeness)}"'


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``, naming the nearest one."""
    known = list(choices)
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}; {nearest(str(value), known)}")
