"""Errors for users, and the wording of their messages.

Every error that a user can cause or fix is a :class:`BucketrankError`. The command line prints its message as one line
and exits with its status; any other exception is a bug and keeps its traceback. A message names the setting, file or
function, what was expected, what came, and what to do.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable
from typing import ClassVar

# Control characters except line feed, line and paragraph separators, text direction marks and lone surrogates.
UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Messages of the torch and onnxruntime allocators, in lower case.
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
MAX_COMPARED = 100  # characters of a mistyped name; the comparison takes quadratic time
MIN_LIKENESS = 0.65  # similarity from which a name is suggested, from 0 to 1
MIN_BEGINNING = 3  # characters that, as the beginning of a name, are enough to suggest it


class BucketrankError(Exception):
    """Base class of all errors for users."""

    exit_status: ClassVar[int] = 1  # 1: the work failed; 2: wrong usage
    names_command: ClassVar[bool] = True  # whether the command line puts the command name before the message


class UsageError(BucketrankError):
    """A command was called with wrong arguments."""

    exit_status = 2


class MissingPackageError(UsageError):
    """A command needs packages that are not installed."""

    names_command = False


class RecipeError(BucketrankError, ValueError):
    """A recipe or a change to it is invalid."""

    exit_status = 2


class DataError(BucketrankError, ValueError):
    """A file or folder cannot be used. The message starts with its path."""

    names_command = False


class WeightsError(DataError):
    """A weights file cannot be used."""


class CheckpointError(DataError):
    """A checkpoint cannot be used."""


class RunFolderError(DataError):
    """A run folder is in use by another process, or holds something else."""


class ChangedDataError(DataError):
    """The data set changed since the run began."""


class CannotCalibrateError(DataError):
    """The scores of a detector cannot be calibrated."""


class ExportError(BucketrankError, RuntimeError):
    """A detector cannot be exported, or the exported file disagrees with torch."""


class NonFiniteLossError(BucketrankError, RuntimeError):
    """The loss became NaN or infinite."""


class KilledProcessError(BucketrankError, RuntimeError):
    """A process of the run was killed."""


class DiskFullError(BucketrankError, OSError):
    """A file cannot be written because the disk or the quota is full."""


class OutOfMemoryError(BucketrankError, RuntimeError):
    """The host or a device has too little memory."""


class FileError(BucketrankError, OSError):
    """The operating system refused to read or write a file. The message names it."""

    names_command = False


def as_user_error(error: Exception) -> BucketrankError | None:
    """Return the error for users that an exception stands for; None if it is a bug.

    >>> as_user_error(MemoryError())
    OutOfMemoryError('not enough memory (the system refused more); use smaller images or batches')
    """
    if isinstance(error, BucketrankError):
        return error
    if is_out_of_memory(error):
        reason = str(error).partition("\n")[0] or "the system refused more"
        return OutOfMemoryError(f"not enough memory ({printable(reason):.200}); use smaller images or batches")
    if not isinstance(error, OSError):
        return None
    if error.filename is None or error.strerror is None:
        return FileError(str(error))
    return FileError(f"{error.filename}: {error.strerror}; check the path and its permissions, or choose another place")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is short, on the host or on a device."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(phrase in text for phrase in OUT_OF_MEMORY)
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its class without a message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def printable(text: object) -> str:
    r"""Return the text with control characters escaped: foreign file names could otherwise steer the terminal.

    Line feeds are kept because messages may have several lines.

    >>> printable("cat\x1b[2J.jpg")
    'cat\\x1b[2J.jpg'
    """
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))


class _ShortRepr(reprlib.Repr):
    """A repr of bounded size and depth: a few lines of YAML with nested aliases expand to gigabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = MAX_QUOTED // 2

    def repr_int(self, value: int, level: int) -> str:
        try:
            return super().repr_int(value, level)
        except ValueError:  # Python prints at most 4,300 digits
            return f"a number of {value.bit_length()} bits"


_SHORT_REPR = _ShortRepr()


def short_repr(value: object) -> str:
    """Return a repr of at most 200 characters, without building the whole one first.

    >>> short_repr("fast"), short_repr([[[["deep"]]]])
    ("'fast'", '[[[[...]]]]')
    """
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a hint at the known name closest to ``word``, to append to a message; empty if none is close.

    ``word`` may be the last part of a dotted name, or the beginning of a name: ``--momentum`` suggests
    ``--schedule.momentum``, and ``retinanet`` suggests ``retinanet-coco``.

    >>> suggest("dleta", ["delta", "method"]), suggest("--foo", ["--out", "--loss.delta"])
    ('; the nearest is "delta"', '')
    """
    word = word[:MAX_COMPARED].removeprefix("--")

    def likeness(name: str) -> float:
        name = name.removeprefix("--")
        last_part = name.rpartition(".")[2]
        ratio = max(difflib.SequenceMatcher(None, word, each).ratio() for each in (name, last_part))
        return max(ratio, MIN_LIKENESS) if len(word) >= MIN_BEGINNING and name.startswith(word) else ratio

    best, name = max(((likeness(name), name) for name in known), key=lambda pair: pair[0], default=(0.0, ""))
    return f'; the nearest is "{name}"' if best >= MIN_LIKENESS else ""


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    known = list(choices)
    if value not in known:
        hint = suggest(value, known) if isinstance(value, str) else ""
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {short_repr(value)}{hint}")
