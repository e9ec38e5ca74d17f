"""What the detectors and their losses are called, and which settings a detector has by itself: read without torch.

The command line lists flags and finds the nearest one before it loads anything heavy, so the source is read, not
imported. Detectors and losses are named in one place each (``catalogue.DETECTORS``, ``criterion.LOSSES``); a test
holds that what is read here is what is there.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HOUSE = Path(__file__).parent
NOT_SETTINGS = {"backbone", "loss", "inputs"}  # the groups that every detector takes


class Setting(NamedTuple):
    """The type as it is written in the source, and the default."""

    kind: str
    default: Any


def detector_names() -> list[str]:
    """The detectors that ``build`` knows."""
    return list(_classes("catalogue", "DETECTORS"))


def loss_names() -> list[str]:
    """The losses that a detector can be trained with."""
    return list(_classes("criterion.__init__", "LOSSES"))


@cache
def own_settings(detector: str) -> dict[str, Setting]:
    """The settings that ``detector`` has by itself.

    >>> own_settings("atss")["topk"]
    Setting(kind='int', default=9)
    """
    name = _classes("catalogue", "DETECTORS")[detector]
    module = _imports("catalogue").get(name)
    found: dict[str, Setting] = {}
    while module is not None:
        node = next(each for each in _tree(module).body if isinstance(each, ast.ClassDef) and each.name == name)
        init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
        if init is not None:
            for argument, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True):
                if argument.arg not in NOT_SETTINGS and default is not None:
                    kind = ast.unparse(argument.annotation) if argument.annotation else "Any"
                    found.setdefault(argument.arg, Setting(kind, ast.literal_eval(default)))
            if init.args.kwarg is None:
                break
        # A constructor that passes on what it does not know has the settings of its parent, too.
        name = ast.unparse(node.bases[0])
        module = _imports(module).get(name)
    return found


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse((HOUSE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))


def _imports(module: str) -> dict[str, str]:
    """From the names that a module imports to the modules of this room in which they are."""
    room = __name__.rpartition(".")[0] + "."
    return {
        alias.name: node.module.removeprefix(room)
        for node in _tree(module).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(room) and node.module
        for alias in node.names
    }


def _classes(module: str, table: str) -> dict[str, str]:
    """The names and classes of a dict that is written out in a module."""
    for node in _tree(module).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table and isinstance(node.value, ast.Dict):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {ast.literal_eval(key): ast.unparse(value) for key, value in pairs if key is not None}
    raise LookupError(f"{module} has no dict {table}")
