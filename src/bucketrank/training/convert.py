"""A value from YAML, JSON or the command line, as the type that a setting has."""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin

WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}


def convert(value: Any, kind: Any, *, name: str) -> Any:
    """``value`` as a ``kind``; ValueError names the setting, what was expected and what came.

    >>> convert("1e-3", float, name="schedule.lr"), convert([640, 800], int | tuple[int, ...], name="inputs.min_size")
    (0.001, (640, 800))
    >>> convert("fast", float | None, name="loss.delta")
    Traceback (most recent call last):
    ValueError: loss.delta: expected a number or null, got 'fast'
    """
    for each in _alternatives(kind):
        try:
            return _as(value, each)
        except (TypeError, ValueError):  # noqa: PERF203 (the alternatives of a type)
            continue
    raise ValueError(f"{name}: expected {in_words(kind)}, got {value!r}")


def in_words(kind: Any) -> str:
    """The type, for a message."""
    parts = []
    for each in _alternatives(kind):
        if get_origin(each) is tuple:
            inner = get_args(each)
            count = "a list of" if len(inner) == 2 and inner[1] is ... else f"a list of {len(inner)}"
            parts.append(f"{count} {WORDS[inner[0]].split(' ', 1)[1]}s")
        elif get_origin(each) is dict:
            parts.append("names with numbers, like {sampling_offsets: 0.1}")
        else:
            parts.append(WORDS.get(each, "a value"))
    return " or ".join(parts)


def _alternatives(kind: Any) -> list[Any]:
    return list(get_args(kind)) if get_origin(kind) in (Union, types.UnionType) else [kind]


def _as(value: Any, kind: Any) -> Any:
    if kind is Any:
        return value
    if get_origin(kind) is tuple:
        return _as_tuple(value, get_args(kind))
    if get_origin(kind) is dict:
        return {_as(key, get_args(kind)[0]): _as(each, get_args(kind)[1]) for key, each in dict(value).items()}
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return float(value)  # YAML reads 1e-3 as a text
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise TypeError


def _as_tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [int(part) if part.strip().isdecimal() else part for part in value.split(",")]
    if not isinstance(value, list | tuple):
        value = [value]
    if len(kinds) == 2 and kinds[1] is ...:
        return tuple(_as(each, kinds[0]) for each in value)
    if len(value) != len(kinds):
        raise ValueError
    return tuple(_as(each, kind) for each, kind in zip(value, kinds, strict=True))
