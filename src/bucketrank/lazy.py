"""Imports on first use, so that reading settings or showing help does not load torch.

This is the only mechanism for it: packages export names with :func:`import_on_use`, and specifications name classes and
functions by import paths, which :func:`import_object` resolves.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def import_object(path: str | Callable[..., Any]) -> Any:
    """Import the object at a path of the form ``package.module:Name``. Anything but a text is returned as it is."""
    if not isinstance(path, str):
        return path
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def import_on_use(package: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return ``__all__`` and ``__getattr__`` of a package, which import its exports on first use.

    The exports stand once, under ``if TYPE_CHECKING``, in the form that type checkers read: ``from a import b as b``.
    If a library is missing, ModuleNotFoundError says how to install it.
    """
    paths = read_exports(package)

    def get(name: str) -> Any:
        if name not in paths:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return import_object(paths[name])
        except ModuleNotFoundError as error:
            raise missing_extra(f"{package}.{name}", error, extra="detect") from error

    return sorted(paths), get


def read_exports(package: str) -> dict[str, str]:
    """Read the exports of a package and their import paths from its source, without running it.

    >>> read_exports("bucketrank.report")
    {'write_report': 'bucketrank.report.page:write_report'}
    """
    source: str = find_spec(package).loader.get_source(package)  # type: ignore[union-attr]
    paths = {}
    for node in ast.walk(ast.parse(source)):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if alias.name == "*":
                paths |= read_exports(str(node.module))
            elif alias.name == alias.asname:
                paths[alias.name] = f"{node.module}:{alias.name}"
    return paths


def missing_extra(user: str, error: ModuleNotFoundError, *, extra: str) -> ModuleNotFoundError:
    """Return the error to raise if ``user`` needs a library that is not installed. It names the extra to install."""
    library = (error.name or "").partition(".")[0]
    if library in ("", "bucketrank"):
        return error
    text = f'{user} needs {library}, which is not installed; install it with: pip install "bucketrank[{extra}]"'
    return ModuleNotFoundError(text, name=error.name, path=error.path)
