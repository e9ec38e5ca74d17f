"""Every setting of a recipe as a flag, like ``--loss.delta 0.25``: declared for jsonargparse from the catalogue.

jsonargparse finds the flags, checks that they have values and prints the help. The values are converted by
``values.convert``, as those of YAML and JSON are, so that one text means the same everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, get_origin

import yaml
from jsonargparse import ArgumentParser

from bucketrank.catalogue.fields import Setting, alternatives, choices_of
from bucketrank.catalogue.values import convert, type_in_words
from bucketrank.recipes.recipe import GROUPS, Recipe, RecipeError, settings_by_key
from bucketrank.recipes.recipe_files import parse_yaml
from bucketrank.suggestions import nearest

SHORT = {"--detector": "--detector.name", "--backbone": "--backbone.name", "--loss": "--loss.name"}
# The parser would nest names with dots, and train also has a flag --data: settings get names that do neither.
DEST, DOT = "setting:", "/"
METAVARS = {int: "N", float: "NUMBER", str: "TEXT", bool: "BOOL", dict: '"{NAME: NUMBER}"', tuple: "LIST"}


def flag_names() -> list[str]:
    """Return every flag that sets something, of all detectors and losses."""
    return [*SHORT, *(f"--{key}" for key in settings_by_key())]


def normalised(word: str) -> str:
    """Return a flag as settings are named: with underscores, and ``--loss`` as ``--loss.name``.

    >>> normalised("--inputs.max-size=640"), normalised("--loss")
    ('--inputs.max_size=640', '--loss.name')
    """
    flag, equals, value = word.partition("=")
    if flag.startswith("--") and "." in flag:
        flag = "--" + flag.removeprefix("--").replace("-", "_")
    return SHORT.get(flag, flag) + equals + value


def add_setting_flags(parser: ArgumentParser, recipe: Recipe | None = None) -> None:
    """Add a flag for every setting; with ``recipe``, only those that it uses, and the help shows its values."""
    values = None if recipe is None else recipe.flat()
    by_group: dict[str, list[tuple[str, Setting]]] = {group: [] for group in (*GROUPS, "init")}
    of_recipe = (None, None) if recipe is None else (recipe.detector.name, recipe.loss.name)
    for key, setting in settings_by_key(*of_recipe).items():
        if values is None or key in values:
            by_group[key.partition(".")[0]].append((key, setting))
    for group, settings in by_group.items():
        section = parser.add_argument_group(f"settings of {group}" if group != "init" else "initial weights")
        for key, setting in settings:
            section.add_argument(f"--{key}", **_argument(key, setting, values))


def parse_setting_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return what flags like ``--loss.delta 0.25`` or ``--loss.delta=0.25`` set, by the key of the setting.

    >>> parse_setting_flags(["--loss.delta", "0.25", "--data.jitter"])
    {'loss.delta': 0.25, 'data.jitter': True}
    """
    words = [normalised(word) for word in words]
    require_known_flags(words, flag_names(), positionals=False)
    used = {word.partition("=")[0].removeprefix("--") for word in words}
    # Only the flags that are used: a study reads hundreds of recipes, and a parser of all flags is slow to build.
    known = {key: setting for key, setting in settings_by_key().items() if key in used}
    parser = ArgumentParser(exit_on_error=False)
    for key, setting in known.items():
        parser.add_argument(f"--{key}", **_argument(key, setting, None))
    try:
        texts = take_settings(dict(vars(parser.parse_args(words))))
    except argparse.ArgumentError as error:
        raise RecipeError(flag_error(error)) from error
    return {key: _converted(text, known[key].type, name=f"--{key}") for key, text in texts.items()}


def take_settings(values: dict[str, Any]) -> dict[str, str]:
    """Remove the settings from what a parser returned, and return their texts by key."""
    names = [name for name in values if name.startswith(DEST)]
    return {name.removeprefix(DEST).replace(DOT, "."): values.pop(name) for name in names}


def require_known_flags(words: Sequence[str], known: Iterable[str], *, positionals: bool = True) -> None:
    """Raise RecipeError for the first flag that does not exist, naming the nearest."""
    flags = set(known)
    value_may_follow = positionals
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag != "--":
            value_may_follow = True
            if flag not in flags:
                raise RecipeError(f'there is no flag "{flag}"; {nearest(flag, known)}')
        elif not value_may_follow:
            raise RecipeError(f'there is no flag "{word}"; {nearest(f"--{word}", known)}')
        else:
            value_may_follow = positionals


def flag_error(error: argparse.ArgumentError) -> str:
    """Return the message of a parser's error in our form: flag, what was expected, what came."""
    flag, _, message = error.message.removeprefix("argument ").partition(": ")
    setting = settings_by_key().get(flag.removeprefix("--"))
    if setting is None:
        return f"{flag}: {message}"
    if message == "expected one argument":
        return f"{flag}: expected {type_in_words(setting.type)} after it, got nothing"
    return message  # the text of values.convert, which names the flag


def _argument(key: str, setting: Setting, values: Mapping[str, Any] | None) -> dict[str, Any]:
    optional: dict[str, Any] = {"nargs": "?", "const": "true"} if bool in alternatives(setting.type) else {}
    help_text = setting.help if values is None else f"{setting.help} [{_short(values[key])}]"
    return {
        "dest": DEST + key.replace(".", DOT),
        "type": _checked(key, setting),
        "default": argparse.SUPPRESS,
        "metavar": _metavar(setting.type),
        "help": help_text.replace("%", "%%"),
        **optional,
    }


def _checked(key: str, setting: Setting) -> Callable[[str], str]:
    """Return a type for the parser that checks the text and keeps it: recipes convert it."""

    def check(text: str) -> str:
        try:
            _converted(text, setting.type, name=f"--{key}")
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    return check


def _converted(text: str, annotation: Any, *, name: str) -> Any:
    """Return the value that YAML reads in ``text`` as the type ``annotation``, or the text itself if only that fits.

    YAML reads the name of a folder like ``2024-11-01`` as a date.
    """
    try:
        return convert(_value(text), annotation, name=name)
    except ValueError:
        with suppress(ValueError):
            return convert(text, annotation, name=name)
        raise


def _value(text: str) -> Any:
    try:
        return parse_yaml(text)
    except (yaml.YAMLError, RecursionError, ValueError):  # ValueError: a date like 2026-13-45
        return text


def _metavar(annotation: Any) -> str:
    choices = choices_of(annotation)
    if choices:
        return "{" + ",".join(choices) + "}"
    first = alternatives(annotation)[0]
    return METAVARS.get(get_origin(first) or first, "VALUE")


def _short(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
