"""Data set problems: one record per problem, and the exception that lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bucketrank.errors import DataError, printable

Severity = Literal["error", "warning"]

MAX_LISTED = 20  # problems in a DataError


@dataclass(frozen=True)
class Problem:
    """A problem in one file. An error stops training, a warning does not.

    ``code`` is the short name of the problem, such as ``unknown-category``. ``id`` names the image, annotation or
    category in the file, if the problem concerns one.

    >>> message = "category 9 is not listed; add it"
    >>> str(Problem("train.json", "unknown-category", "annotation 7", message))
    'train.json: annotation 7: category 9 is not listed; add it'
    """

    file: str  # file with the problem
    code: str
    id: str | None  # image, annotation or category
    message: str  # problem and remedy
    severity: Severity = "error"  # an error stops training

    def __str__(self) -> str:
        parts = (self.file, self.id, self.message)
        return ": ".join(printable(part).replace("\n", "\\n") for part in parts if part)


def raise_errors(problems: Sequence[Problem]) -> None:
    """Raise one DataError that counts the errors by code and lists the first 20; do nothing without errors."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if not errors:
        return
    lines = [f"  {problem}" for problem in errors[:MAX_LISTED]]
    if len(errors) > MAX_LISTED:
        lines.append(f"  ... and {len(errors) - MAX_LISTED} more")
    codes = ", ".join(f"{count} {code}" for code, count in Counter(error.code for error in errors).most_common())
    raise DataError("\n".join([f"the data set has {counted(len(errors), 'error')} ({codes}):", *lines]))


def listed(names: Sequence[str], limit: int) -> str:
    """Join names; beyond ``limit``, only give their number.

    >>> listed(["cat", "dog"], 2), listed(["cat", "dog", "cow", "hen"], 2)
    ('cat, dog', 'cat, dog and 2 more')
    """
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def counted(number: int, noun: str, *, plural: str | None = None) -> str:
    """Format a number with its noun in the singular or plural.

    >>> counted(1, "error"), counted(2000, "error")
    ('1 error', '2,000 errors')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
