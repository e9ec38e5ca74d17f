"""Import paths of the form ``package.module:Name``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def import_object(path: str | Callable[..., Any]) -> Any:
    """Return the object at an import path; an object is returned as it is."""
    if not isinstance(path, str):
        return path
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
