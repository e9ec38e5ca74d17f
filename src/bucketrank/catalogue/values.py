"""Values from YAML, JSON or the command line, converted to the type of a setting."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from bucketrank.catalogue.fields import alternatives, choices_of
from bucketrank.suggestions import nearest, short_repr

IN_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}


def convert(value: Any, annotation: Any, *, name: str) -> Any:
    """Return ``value`` as the type ``annotation``; ValueError names the setting, what was expected and what came.

    >>> convert("1e-3", float, name="schedule.lr"), convert([640, 800], int | tuple[int, ...], name="inputs.min_size")
    (0.001, (640, 800))
    >>> convert("fast", float | None, name="loss.delta")
    Traceback (most recent call last):
    ValueError: loss.delta: expected a number or null, got 'fast'
    """
    for each in alternatives(annotation):
        try:
            return _as(value, each)
        except (TypeError, ValueError):  # noqa: PERF203 (the alternatives of a type)
            continue
    choices = choices_of(annotation)
    got = value if isinstance(value, str) else short_repr(value)
    suggestion = f"; {nearest(got, choices)}" if choices else ""
    raise ValueError(f"{name}: expected {type_in_words(annotation)}, got {short_repr(value)}{suggestion}")


def type_in_words(annotation: Any) -> str:
    """Return a description of the type for messages."""
    choices = choices_of(annotation)
    parts = [f"one of {', '.join(choices)}"] if choices else []
    for each in alternatives(annotation):
        if get_origin(each) is Literal:
            continue
        if get_origin(each) is tuple:
            inner = get_args(each)
            count = "a list of" if len(inner) == 2 and inner[1] is ... else f"a list of {len(inner)}"
            parts.append(f"{count} {IN_WORDS[inner[0]].split(' ', 1)[1]}s")
        elif get_origin(each) is dict:
            parts.append("names with numbers, like {sampling_offsets: 0.1}")
        else:
            parts.append(IN_WORDS.get(each, "a value"))
    return " or ".join(parts)


def _as(value: Any, annotation: Any) -> Any:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        if value in inner:
            return value
        raise ValueError
    if origin is tuple:
        return _as_tuple(value, inner)
    if origin is dict:
        return {_as(key, inner[0]): _as(each, inner[1]) for key, each in dict(value).items()}
    if annotation is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return float(value)  # YAML reads 1e-3 as a text
    if annotation is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, annotation) and not (annotation is int and isinstance(value, bool)):
        return value
    raise TypeError


def _as_tuple(value: Any, inner: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else part for part in map(str.strip, value.split(","))]
    if not isinstance(value, list | tuple):
        value = [value]
    if len(inner) == 2 and inner[1] is ...:
        return tuple(_as(each, inner[0]) for each in value)
    if len(value) != len(inner):
        raise ValueError
    return tuple(_as(each, annotation) for each, annotation in zip(value, inner, strict=True))
