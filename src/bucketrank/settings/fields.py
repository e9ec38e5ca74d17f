"""Settings as dataclasses: every field says its type, its default and what it means.

A field is declared as ``name: Annotated[type, "help text"] = default``. Recipes, flags, ``--help`` and ``build`` read
:func:`describe` and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from bucketrank.suggestions import require_choice, short_repr


class Setting(NamedTuple):
    """One field of a group of settings."""

    name: str  # name of the field
    type: Any  # type of its values
    default: Any  # its value if none is given
    help: str  # one line for --help


@dataclass(frozen=True)
class Settings:
    """Base of every group of settings. ``group`` is its name in recipes and flags: ``loss`` in ``--loss.delta``."""

    group: ClassVar[str]

    def __post_init__(self) -> None:
        for setting in describe(type(self)):
            choices, value = choices_of(setting.type), getattr(self, setting.name)
            if choices and not (value is None and type(None) in alternatives(setting.type)):
                require_choice(f"{self.group}.{setting.name}", value, choices)

    def require(self, setting: str, expected: str, *, holds: bool) -> None:
        """Raise ValueError unless ``holds``, naming the setting, what was expected and its value."""
        if not holds:
            raise ValueError(f"{self.group}.{setting}: expected {expected}, got {short_repr(getattr(self, setting))}")

    def require_finite(self, *names: str) -> None:
        """Raise unless these settings are None or finite numbers of at least 0."""
        for name in names:
            value = getattr(self, name)
            valid = value is None or (math.isfinite(value) and value >= 0)
            self.require(name, "a finite number of at least 0", holds=valid)


def describe(settings: type[Settings]) -> tuple[Setting, ...]:
    """Return the fields of a group of settings, in the order of their declaration.

    Args:
        settings: the class of the settings.
    """
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
    """Return the members of a union, or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for each in get_args(annotation) for member in alternatives(each)]
    return [annotation]


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the values of the Literal in an annotation; empty if it has none."""
    literals = [each for each in alternatives(annotation) if get_origin(each) is Literal]
    return tuple(dict.fromkeys(value for literal in literals for value in get_args(literal)))
