"""Packages whose names are imported on first use, so that reading settings or showing help does not load torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def import_on_use(
    package: str, modules: Mapping[str, tuple[str, ...]], *, extra: str = "detect"
) -> tuple[list[str], Callable[[str], Any]]:
    """Return ``__all__`` and ``__getattr__`` of a package; ``modules`` maps modules to the names taken from them.

    If a name needs a library that is not installed, ModuleNotFoundError says how to install the ``extra`` it is in.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            raise missing_extra(f"{package}.{name}", error, extra=extra) from error

    return sorted(homes), get


def missing_extra(user: str, error: ModuleNotFoundError, *, extra: str) -> ModuleNotFoundError:
    """Return the error to raise if ``user`` needs a library that is not installed: it names the extra to install."""
    library = (error.name or "").partition(".")[0]
    if library in ("", "bucketrank"):
        return error
    text = f'{user} needs {library}, which is not installed; install it with: pip install "bucketrank[{extra}]"'
    return ModuleNotFoundError(text, name=error.name, path=error.path)
