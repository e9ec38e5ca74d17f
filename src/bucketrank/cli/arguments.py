"""From the words of a command line to the call of a function, whose signature is the parser.

The help of a flag is the text in its ``Annotated`` type. Nothing heavy is imported here.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from bucketrank.suggestions import nearest, require_choice

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

Command = Callable[..., int | None]  # returns the exit status, None for 0
Commands = dict[str, Union[Command, "Commands"]]

TYPES = {"int": "a whole number", "float": "a number"}
PACKAGES = {"PIL": "pillow", "faster_coco_eval": "faster-coco-eval", "yaml": "PyYAML"}  # where the names differ


class UsageError(Exception):
    """A command was called in a wrong way; the message says what to do instead."""


class SettingFlags(list[str]):
    """The words of a command line that change settings of a recipe, like ``--loss.delta 0.25``."""


def call(commands: Commands, words: list[str]) -> int:
    """Find the command among the words, parse its arguments, call it, and return the exit status."""
    if words[:1] == ["--version"]:
        from bucketrank import __version__

        sys.stdout.write(f"bucketrank {__version__}\n")
        return 0
    path: list[str] = []
    command: Command | Commands = commands
    while isinstance(command, dict):
        word = words[len(path)] if len(path) < len(words) else "--help"
        if word in ("-h", "--help"):
            sys.stdout.write(_overview(path, command))
            return 0
        if word not in command:
            raise UsageError(_no_such_command(commands, words, len(path)))
        path.append(word)
        command = command[word]
    return command(**_parse(command, path, words[len(path) :])) or 0


def _parse(command: Command, path: list[str], words: list[str]) -> dict[str, Any]:
    """Return the keyword arguments of a command from its words."""
    require("jsonargparse", extra="bench" if path[0] == "bench" else "detect")
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog=" ".join(["bucketrank", *path]),
        description=command.__doc__,
        formatter_class=argparse.HelpFormatter,
        exit_on_error=False,
    )
    hints = get_type_hints(command, include_extras=True)
    flags = ["--help"]
    settings_name = None
    for name, parameter in inspect.signature(command).parameters.items():
        annotation, text = get_args(hints[name])
        if annotation is SettingFlags:
            settings_name = name
        else:
            flags += _add_argument(parser, parameter, annotation, text)
    if settings_name is None:
        return _parsed(parser, path, words, flags)
    require("yaml", extra="detect")
    from bucketrank.recipes.setting_flags import flag_names, normalised, take_settings

    words = [normalised(word) for word in words]
    _add_settings(parser, words)
    values = _parsed(parser, path, words, [*flags, *flag_names()])
    texts = take_settings(values)
    return values | {settings_name: SettingFlags(word for key, text in texts.items() for word in (f"--{key}", text))}


def _add_argument(parser: ArgumentParser, parameter: inspect.Parameter, annotation: Any, text: str) -> list[str]:
    """Add one parameter of a command to its parser, and return its flags."""
    from jsonargparse import ActionYesNo

    if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
        several: dict[str, Any] = {"nargs": "+"} if get_origin(annotation) is list else {}
        if parameter.default is None:
            several = {"nargs": "?"}
        parser.add_argument(
            parameter.name, type=get_args(annotation)[0] if several else annotation, help=text, **several
        )
        return []
    flag = "--" + parameter.name.replace("_", "-")
    if annotation is not bool and parameter.default is not None:
        text += f" ({parameter.default})"
    if bool in (annotation, *get_args(annotation)):
        parser.add_argument(flag, action=ActionYesNo(no_prefix="no-"), default=parameter.default, help=text)
        return [flag, "--no-" + flag.removeprefix("--")]
    parser.add_argument(flag, type=annotation, default=parameter.default, help=text)
    return [flag]


def _add_settings(parser: ArgumentParser, words: list[str]) -> None:
    """Add the settings of recipes as flags; ``--help`` shows those of the recipe named among the words."""
    from bucketrank.recipes import RecipeError, load_recipe, recipe_names
    from bucketrank.recipes.setting_flags import add_setting_flags

    if not {"-h", "--help"} & {*words}:
        add_setting_flags(parser)
        return
    known = recipe_names()
    named = (word for word in words if word in known or word.endswith((".yaml", ".yml")))
    name = next(named, "atss-r50-rs")
    try:
        add_setting_flags(parser, load_recipe(name))
    except RecipeError as error:
        raise UsageError(f"{parser.prog.removeprefix('bucketrank ')}: {error}") from error
    positional = [
        f"[{action.dest}]" if action.nargs == "?" else action.dest
        for action in parser._actions
        if not action.option_strings
    ]
    parser.usage = " ".join([parser.prog, *positional, "[options]", "[settings]"])
    parser.epilog = f"The values in brackets are those of the recipe {name}."


def _parsed(parser: ArgumentParser, path: list[str], words: list[str], flags: list[str]) -> dict[str, Any]:
    """Parse the words; UsageError names what is wrong and, for an unknown flag, the nearest one."""
    command = " ".join(path)
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag != "--" and flag not in flags:
            raise UsageError(f'{command}: there is no flag "{flag}"; {nearest(flag, flags)}')
    try:
        return dict(vars(parser.parse_args(words)))
    except argparse.ArgumentError as error:
        raise UsageError(f"{command}: {_message_of(error)}") from error


def _message_of(error: argparse.ArgumentError) -> str:
    """Return a parser's message in our form: the flag, what was expected, what came."""
    if error.message.startswith("argument --") and importlib.util.find_spec("yaml") is not None:
        from bucketrank.recipes.setting_flags import flag_error

        return flag_error(error)
    key = re.search(r'Parser key "([\w.]+)"', error.message)
    types = [word for name, word in TYPES.items() if f"<class '{name}'>" in error.message]
    value = re.search(r"(?:Given value|Got value): (.*)", error.message)
    if key is None or value is None or not types:
        return error.message
    return f"--{key[1].replace('_', '-')}: expected {' or '.join(types)}, got {value[1]!r}"


def require(*modules: str, extra: str = "bench") -> None:
    """Raise UsageError that says how to install what is missing."""
    missing = [PACKAGES.get(module, module) for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(f'this command needs {" and ".join(missing)}; install with: pip install "bucketrank[{extra}]"')


def require_device(command: str, device: str) -> None:
    """Raise UsageError unless torch can use the device."""
    from bucketrank.devices import resolve_device

    try:
        resolve_device(device)
    except ValueError as error:
        raise UsageError(f"{command}: --{error}") from error


def require_flag(command: str, flag: str, value: str | None, choices: Iterable[str]) -> None:
    """Raise UsageError unless the value of a flag is one of ``choices``, or None because it was not given."""
    try:
        if value is not None:
            require_choice(f"{command}: --{flag}", value, choices)
    except ValueError as error:
        raise UsageError(str(error)) from error


def listed(flag: str, text: str, parse: Callable[[str], Any]) -> tuple[Any, ...]:
    """Return the values between the commas after a flag; ValueError names the flag."""
    try:
        return tuple(parse(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{flag}: expected numbers separated by commas, got {text!r}") from error


def _leaves(commands: Commands, path: tuple[str, ...] = ()) -> list[tuple[str, Command]]:
    """Return all commands with their full names."""
    leaves = []
    for name, command in commands.items():
        if isinstance(command, dict):
            leaves += _leaves(command, (*path, name))
        else:
            leaves.append((" ".join((*path, name)), command))
    return leaves


def _overview(path: list[str], commands: Commands) -> str:
    leaves = _leaves(commands, tuple(path))
    width = max(len(name) for name, _ in leaves)
    lines = [f"  bucketrank {name:<{width}}  {inspect.getdoc(command)}" for name, command in leaves]
    return "\n".join(["Ranking losses for object detection.", "", *lines, "", "Each command has --help.", ""])


def _no_such_command(commands: Commands, words: list[str], known: int) -> str:
    typed = " ".join(words[: known + 1])
    # With the next word, too: in "benhc losses" the second word shows what was meant.
    meant = " ".join(word for word in words[: known + 2] if not word.startswith("-"))
    names = [name for name, _ in _leaves(commands)]
    closest = max(names, key=lambda name: difflib.SequenceMatcher(None, meant, name).ratio())
    return f'there is no command "{typed}"; the nearest is "bucketrank {closest}"'
