"""Settings as dataclasses, and the conversion of their values.

A field is declared as ``name: Annotated[type, "help text"] = default``. Recipes, flags, ``--help`` and ``build`` read
the declaration with :func:`describe`. :func:`convert` turns a value from YAML, JSON, a flag or Python into that type.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from bucketrank.errors import require_choice, short_repr, suggest

MAX_NESTED = 10_000  # characters that open a YAML list or group; libyaml crashes at about 50,000 levels
TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Path: "a path",
}


class Setting(NamedTuple):
    """The declaration of one setting."""

    name: str  # field name
    type: Any  # type of the values
    default: Any  # value if none is given
    help: str  # one line for --help


@dataclass(frozen=True)
class Settings:
    """Base class of the setting groups. ``group`` is the name in recipes and flags: ``loss`` in ``--loss.delta``."""

    group: ClassVar[str]
    filled_by_run: ClassVar[tuple[str, ...]] = ()  # settings that a run computes if they are left open

    def __post_init__(self) -> None:
        for setting in describe(type(self)):
            choices, value = choices_of(setting.type), getattr(self, setting.name)
            for each in value if isinstance(value, tuple) else (value,):
                if choices and not (each is None and type(None) in alternatives(setting.type)):
                    require_choice(f"{self.group}.{setting.name}", each, choices)

    def require(self, setting: str, expected: str, *, holds: bool) -> None:
        """Raise ValueError unless ``holds``. The message names the setting, what was expected and the value."""
        if not holds:
            raise ValueError(f"{self.group}.{setting}: expected {expected}, got {short_repr(getattr(self, setting))}")

    def require_min(self, **minima: int) -> None:
        """Raise ValueError unless each of these settings is None or at least its minimum."""
        for name, minimum in minima.items():
            value = getattr(self, name)
            self.require(name, f"at least {minimum}", holds=value is None or value >= minimum)

    def require_finite(self, *names: str) -> None:
        """Raise ValueError unless these settings are None or finite numbers of at least 0."""
        for name in names:
            value = getattr(self, name)
            valid = value is None or (math.isfinite(value) and value >= 0)
            self.require(name, "a finite number of at least 0", holds=valid)


def describe(settings: type[Settings]) -> tuple[Setting, ...]:
    """Return the declared settings of the group ``settings``, in order."""
    if settings not in _described:
        _described[settings] = tuple(_read_fields(settings))
    return _described[settings]


_described: dict[type[Settings], tuple[Setting, ...]] = {}


def _read_fields(settings: type[Settings]) -> Iterator[Setting]:
    hints = get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        hint = hints[field.name]
        if not hasattr(hint, "__metadata__"):
            raise TypeError(f"{settings.__name__}.{field.name}: expected Annotated[type, 'help text'], got {hint}")
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield Setting(field.name, get_args(hint)[0], default, hint.__metadata__[0])


def alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union; any other annotation is its only member."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for each in get_args(annotation) for member in alternatives(each)]
    return [annotation]


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the values of all Literals in an annotation, including those in tuples.

    >>> choices_of(Literal["a", "b"] | None), choices_of(tuple[Literal["a", "b"], ...])
    (('a', 'b'), ('a', 'b'))
    """
    members = [inner for each in alternatives(annotation) for inner in (each, *_items(each))]
    literals = [each for each in members if get_origin(each) is Literal]
    return tuple(dict.fromkeys(value for literal in literals for value in get_args(literal)))


def _items(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is tuple else ()


class FlagText(str):
    """The text after a flag. :func:`convert` reads it as YAML, like a value in a recipe file."""

    __slots__ = ()


def convert(value: Any, annotation: Any, *, name: str) -> Any:
    """Convert ``value`` to the type ``annotation``. ValueError names the setting, the expected type and the value.

    A flag's text stays a string if the type allows one: YAML would read a folder called ``2024-11-01`` as a date.

    >>> convert("1e-3", float, name="schedule.lr"), convert([640, 800], int | tuple[int, ...], name="inputs.min_size")
    (0.001, (640, 800))
    >>> convert(FlagText("640,800"), int | tuple[int, ...], name="--inputs.min_size")
    (640, 800)
    >>> convert("fast", float | None, name="loss.delta")
    Traceback (most recent call last):
    ValueError: loss.delta: expected a number or null, got 'fast'
    """
    read = _read_text(value) if isinstance(value, FlagText) else value
    members = alternatives(annotation)
    if read is None and type(None) in members:
        return None
    for each in members:
        is_text = isinstance(value, FlagText) and (each in (str, Path) or get_origin(each) is Literal)
        try:
            return _as(str(value) if is_text else read, each)
        except (OverflowError, TypeError, ValueError):  # OverflowError: an integer too large for a float
            continue
    choices = choices_of(annotation)
    hint = suggest(value, choices) if isinstance(value, str) else ""
    raise ValueError(f"{name}: expected {format_type(annotation)}, got {short_repr(read)}{hint}")


def format_type(annotation: Any) -> str:
    """Describe a type in messages.

    >>> format_type(tuple[int, ...] | None), format_type(Literal["sgd", "adamw"])
    ('a list of whole numbers or null', 'one of sgd, adamw')
    """
    literals = [each for each in alternatives(annotation) if get_origin(each) is Literal]
    choices = dict.fromkeys(choice for literal in literals for choice in get_args(literal))
    parts = [f"one of {', '.join(choices)}"] if choices else []
    for each in alternatives(annotation):
        inner = get_args(each)
        if get_origin(each) is tuple and get_origin(inner[0]) is Literal:
            parts.append(f"any of {', '.join(get_args(inner[0]))}")
        elif get_origin(each) is tuple:
            count = "a list of" if inner[-1] is ... else f"a list of {len(inner)}"
            parts.append(f"{count} {TYPE_NAMES[inner[0]].removeprefix('a ')}s")
        elif get_origin(each) is dict:
            parts.append("names with numbers, like {sampling_offsets: 0.1}")
        elif each not in literals:
            parts.append(TYPE_NAMES.get(each, "a value"))
    return " or ".join(dict.fromkeys(parts))


def parse_yaml(text: str) -> Any:
    """Parse YAML, with libyaml if it is installed. RecursionError if the text may be nested too deeply."""
    import yaml

    if sum(map(text.count, "[{-?")) > MAX_NESTED:
        raise RecursionError
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (both are safe)


def _read_text(text: str) -> Any:
    import yaml

    try:
        return parse_yaml(str(text))  # libyaml takes no subclass of str
    except (yaml.YAMLError, RecursionError, ValueError):  # ValueError: a date like 2026-13-45
        return str(text)


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
        return float(value)  # YAML reads 1e-3 as a string
    if annotation is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if annotation is Path and isinstance(value, str):
        return Path(value)
    if isinstance(value, annotation) and not (annotation is int and isinstance(value, bool)):
        return value
    raise TypeError


def _as_tuple(value: Any, inner: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else part for part in map(str.strip, value.split(","))]
    if not isinstance(value, list | tuple):
        value = [value]
    inner = tuple(str if get_origin(each) is Literal else each for each in inner)  # Settings checks each choice
    if len(inner) == 2 and inner[1] is ...:
        return tuple(_as(each, inner[0]) for each in value)
    if len(value) != len(inner):
        raise ValueError
    return tuple(_as(each, annotation) for each, annotation in zip(value, inner, strict=True))
