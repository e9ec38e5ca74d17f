"""Imports on first use, so that reading settings or showing help does not load torch.

This is the only mechanism for it: packages export names with :func:`import_on_use`, and specifications name classes and
functions by import paths, which :func:`import_object` resolves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def import_object(path: str | Callable[..., Any]) -> Any:
    """Import the object at a path of the form ``package.module:Name``. Anything but a text is returned as it is."""
    if not isinstance(path, str):
        return path
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def import_on_use(package: str, modules: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """Return ``__all__`` and ``__getattr__`` of a package. ``modules`` maps modules to the names that they define.

    If a library is missing, ModuleNotFoundError says how to install it.
    """
    paths = {name: f"{module}:{name}" for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in paths:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return import_object(paths[name])
        except ModuleNotFoundError as error:
            raise missing_extra(f"{package}.{name}", error, extra="detect") from error

    return sorted(paths), get


def missing_extra(user: str, error: ModuleNotFoundError, *, extra: str) -> ModuleNotFoundError:
    """Return the error to raise if ``user`` needs a library that is not installed. It names the extra to install."""
    library = (error.name or "").partition(".")[0]
    if library in ("", "bucketrank"):
        return error
    text = f'{user} needs {library}, which is not installed; install it with: pip install "bucketrank[{extra}]"'
    return ModuleNotFoundError(text, name=error.name, path=error.path)
