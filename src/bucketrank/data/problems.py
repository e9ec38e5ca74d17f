"""What can be wrong with a data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SHOWN = 20  # messages in an error


class DataError(ValueError):
    """The data cannot be used as it is; the message says where, what and what to do."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong in one file: an error stops training, a warning does not.

    ``id`` is that of the image, annotation or category in the file, if it has one.

    >>> str(Problem("train.json", "unknown-category", "annotation 7", "category 9 is not listed; add it"))
    'train.json: annotation 7: category 9 is not listed; add it'
    """

    file: str
    kind: str
    id: str | None
    message: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.id, self.message) if part)


def raise_errors(problems: Sequence[Problem]) -> None:
    """Raise one DataError with the first errors and the number of each kind, if there is an error."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if not errors:
        return
    lines = [f"  {problem}" for problem in errors[:SHOWN]]
    if len(errors) > SHOWN:
        lines.append(f"  ... and {len(errors) - SHOWN} more")
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(error.kind for error in errors).most_common())
    raise DataError("\n".join([f"the data set has {counted(len(errors), 'error')} ({kinds}):", *lines]))


def counted(number: int, noun: str, *, plural: str | None = None) -> str:
    """The number with its noun.

    >>> counted(1, "error"), counted(2000, "error")
    ('1 error', '2,000 errors')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
