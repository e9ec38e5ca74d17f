"""Calls of compiled kernels that Ctrl-C and other signals may interrupt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def call_kernel(kernel: Callable[..., Any], *arguments: Any) -> Any:
    """Call a compiled ``kernel``; raise what a signal handler has raised meanwhile.

    numba converts arguments and results in C code that calls Python functions. If a signal handler raises in one of
    them, such as KeyboardInterrupt, the conversion continues, and Python turns the exception into the cause of a
    SystemError, "returned a result with an exception set".
    """
    try:
        return kernel(*arguments)
    except SystemError as error:
        cause = _first_cause(error)
    raise cause  # outside the except block, so that the SystemError does not become its context


def _first_cause(error: BaseException) -> BaseException:
    """Follow the causes of ``error`` to the first exception that is not a SystemError."""
    cause: BaseException | None = error
    while isinstance(cause, SystemError):
        cause = cause.__cause__ or cause.__context__
    return cause or error
