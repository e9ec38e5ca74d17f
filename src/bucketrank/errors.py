"""Helpers for messages: the known name closest to a mistyped one, names that are safe to print, lack of memory."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable

# Control characters except line feed, line and paragraph separators, marks that reverse text, and half characters.
UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# What the allocators of torch and onnxruntime say, in lower case.
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate memory",
    "not enough memory",
    "bad allocation",
    "bad_alloc",
)

MAX_QUOTED = 200  # characters of a quoted value
MAX_COMPARED = 100  # characters of a mistyped name; comparing takes time that grows with the square


def printable(text: object) -> str:
    r"""Return the text with control characters escaped: those of a stranger's file names could steer the terminal.

    Line feeds are kept, because messages have several lines.

    >>> printable("cat\x1b[2J.jpg")
    'cat\\x1b[2J.jpg'
    """
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is short, on the host or on a device."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(phrase in text for phrase in OUT_OF_MEMORY)
    )


class _ShortRepr(reprlib.Repr):
    """A repr of bounded size and depth: a few lines of YAML with aliases of aliases make a value of gigabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = MAX_QUOTED // 2

    def repr_int(self, value: int, level: int) -> str:
        try:
            return super().repr_int(value, level)
        except ValueError:  # Python prints no number of more than 4,300 digits
            return f"a number of {value.bit_length()} bits"


_SHORT_REPR = _ShortRepr()


def short_repr(value: object) -> str:
    """Return a repr of at most 200 characters, without building the whole one first.

    >>> short_repr("fast"), short_repr([[[["deep"]]]])
    ("'fast'", '[[[[...]]]]')
    """
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word most like ``word``, as part of a sentence.

    A word that is the last part of a dotted name means that name: ``--lr`` means ``--schedule.lr``.

    >>> nearest("dleta", ["delta", "method"])
    'the nearest is "delta"'
    """
    word = word[:MAX_COMPARED]

    def likeness(name: str) -> float:
        last_part = "--" + name.rpartition(".")[2] if name.startswith("--") and "." in name else name
        return max(difflib.SequenceMatcher(None, word, each).ratio() for each in (name, last_part))

    return f'the nearest is "{max(known, key=likeness)}"'


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``, naming the nearest one."""
    known = list(choices)
    if value not in known:
        got = value if isinstance(value, str) else short_repr(value)
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {short_repr(value)}; {nearest(got, known)}")
