"""From the words of a command line to the call of a function: a function's signature is its parser.

The help of a flag is the text in its ``Annotated`` type. Nothing heavy is imported here.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin, get_type_hints

Command = Callable[..., int | None]  # what it returns is the exit status
Commands = dict[str, Union[Command, "Commands"]]

PACKAGES = {"PIL": "pillow", "faster_coco_eval": "faster-coco-eval", "yaml": "PyYAML"}  # where the names differ


class UsageError(Exception):
    """The command cannot do what was asked; the message says what to do instead."""


class SettingFlags(list[str]):
    """The words of a command that set something in a recipe, like ``--loss.delta 0.25``."""


def call(commands: Commands, words: list[str]) -> int:
    """Find the command among the words, read its arguments, call it; returns the exit status."""
    if words[:1] == ["--version"]:
        from bucketrank import __version__

        sys.stdout.write(f"bucketrank {__version__}\n")
        return 0
    path: list[str] = []
    found: Command | Commands = commands
    while isinstance(found, dict):
        word = words[len(path)] if len(path) < len(words) else "--help"
        if word in ("-h", "--help"):
            sys.stdout.write(_overview(path, found))
            return 0
        if word not in found:
            raise UsageError(_no_such_command(commands, words, len(path)))
        path.append(word)
        found = found[word]
    return found(**_parse(found, path, words[len(path) :])) or 0


def _parse(command: Command, path: list[str], words: list[str]) -> dict[str, Any]:
    require("jsonargparse", extra="bench" if path[0] == "bench" else "detect")
    from jsonargparse import ActionYesNo, ArgumentParser

    program = " ".join(["bucketrank", *path])
    parser = ArgumentParser(prog=program, description=command.__doc__, formatter_class=argparse.HelpFormatter)
    hints = get_type_hints(command, include_extras=True)
    flags = ["--help"]
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind, text = get_args(hints[name])
        if kind is SettingFlags:
            given[name], words, known = _settings(words)
            flags += known
            if "--help" in words or "-h" in words:
                _describe_settings(parser, words)
            continue
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            several: dict[str, Any] = {"nargs": "+"} if get_origin(kind) is list else {}
            if parameter.default is None:
                several = {"nargs": "?"}
            parser.add_argument(name, type=get_args(kind)[0] if several else kind, help=text, **several)
            continue
        flag = "--" + name.replace("_", "-")
        flags.append(flag)
        if kind is not bool and parameter.default is not None:
            text += f" ({parameter.default})"
        if bool in (kind, *get_args(kind)):
            flags.append("--no-" + flag.removeprefix("--"))
            parser.add_argument(flag, action=ActionYesNo(no_prefix="no-"), default=parameter.default, help=text)
        else:
            parser.add_argument(flag, type=kind, default=parameter.default, help=text)
    for word in words:
        typed = word.partition("=")[0]
        if typed.startswith("--") and typed != "--" and typed not in flags:
            raise UsageError(f'{" ".join(path)}: there is no flag "{typed}"; the nearest is "{_nearest(typed, flags)}"')
    return dict(vars(parser.parse_args(words))) | given


def _settings(words: list[str]) -> tuple[SettingFlags, list[str], list[str]]:
    """The words that set something in a recipe, the other words, and the flags there are for settings."""
    require("yaml", extra="detect")
    from bucketrank.training.recipe import known_flags

    known = known_flags()
    mine, rest = SettingFlags(), list[str]()
    left = list(words)
    while left:
        word = left.pop(0)
        typed = word.partition("=")[0]
        if typed.startswith("--") and ("." in typed or typed in known):
            mine.append(word)
            if "=" not in word and left and not left[0].startswith("--"):
                mine.append(left.pop(0))
        else:
            rest.append(word)
    return mine, rest, known


def _describe_settings(parser: argparse.ArgumentParser, words: list[str]) -> None:
    from bucketrank.training.show import help_on_settings

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_on_settings(words)


def require(*modules: str, extra: str = "bench") -> None:
    """Says how to install what is missing."""
    missing = [PACKAGES.get(module, module) for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        needs = " and ".join(missing)
        raise UsageError(f'this command needs {needs}; install with: pip install "bucketrank[{extra}]"')


def _leaves(commands: Commands, path: tuple[str, ...] = ()) -> list[tuple[str, Command]]:
    leaves = []
    for name, found in commands.items():
        if isinstance(found, dict):
            leaves += _leaves(found, (*path, name))
        else:
            leaves.append((" ".join((*path, name)), found))
    return leaves


def _overview(path: list[str], commands: Commands) -> str:
    leaves = _leaves(commands, tuple(path))
    width = max(len(name) for name, _ in leaves)
    lines = [f"  bucketrank {name:<{width}}  {inspect.getdoc(command)}" for name, command in leaves]
    return "\n".join(["Ranking losses for object detection.", "", *lines, "", "Each command has --help.", ""])


def _no_such_command(commands: Commands, words: list[str], known: int) -> str:
    typed = " ".join(words[: known + 1])
    # With one word more: in "benhc losses" the second word tells what was meant.
    meant = " ".join(word for word in words[: known + 2] if not word.startswith("-"))
    names = [name for name, _ in _leaves(commands)]
    return f'there is no command "{typed}"; the nearest is "bucketrank {_nearest(meant, names)}"'


def _nearest(typed: str, names: list[str]) -> str:
    def likeness(name: str) -> float:
        # Who types --lr means --schedule.lr.
        last = "--" + name.rpartition(".")[2] if "." in name else name
        return max(difflib.SequenceMatcher(None, typed, each).ratio() for each in (name, last))

    return max(names, key=likeness)


def listed(flag: str, text: str, parse: Callable[[str], Any]) -> tuple[Any, ...]:
    """What stands between the commas after a flag; ValueError if it is nothing of the kind."""
    try:
        return tuple(parse(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{flag}: expected numbers with commas between, got {text!r}") from error
