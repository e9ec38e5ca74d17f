"""Build a command line from function signatures.

A command is a function. Its positional parameters are the positional arguments, its keyword-only parameters the flags,
and its docstring is the help. The data set may be positional or follow ``--data``. A parameter is declared as
``name: Annotated[type, "help text"] = default``, like the settings of a recipe, and
:func:`bucketrank.settings.fields.convert` converts its text. A parameter of type :data:`Changes` collects the flags
that change a recipe.

We use argparse from the standard library. jsonargparse, tyro and cyclopts neither read lists, null and mappings as our
recipe files have them nor let us word the messages, their imports take 150 to 290 ms instead of 30, and none of them
has settings that depend on the recipe named on the same command line.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from bucketrank.errors import (
    MIN_LIKENESS,
    BucketrankError,
    MissingPackageError,
    UsageError,
    as_user_error,
    printable,
)

if TYPE_CHECKING:
    from bucketrank.settings.flags import FlagParser

Command = Callable[..., int | None]  # returns the exit status, None for 0
Commands = dict[str, Union[Command, "Commands"]]
Changes = dict[str, str]  # texts of setting flags by key: {"loss.delta": "0.25"}

DATA = "data"  # a positional parameter of this name may also be given as a flag
SMALL_EXTRAS = {"demo": "demo"}  # extras of commands that need less than the others
SAMPLE_RECIPE = "atss-r50-rs"  # its settings are shown by --help if no recipe is named
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,. -]+)\])?.*?;.*\bextra\s*==\s*[\"']([\w-]+)[\"']")


def run(
    commands: Commands,
    words: Sequence[str] | None = None,
    *,
    program: str = "bucketrank",
    summary: str = "Ranking losses for object detection.",
    extra: str = "detect",
) -> int:
    """Run a command and return its exit status.

    The status is 0, 1 if the work failed, 2 for wrong usage, or 130 if interrupted.

    Args:
        commands: functions by name, possibly nested.
        words: command line (default: ``sys.argv``).
        program: program name in help and messages.
        summary: first line of the help.
        extra: package extra that the commands need, except those in ``SMALL_EXTRAS``.
    """
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] == ["--version"]:
        from bucketrank import __version__

        sys.stdout.write(f"{program} {__version__}\n")
        return 0
    path: list[str] = []
    try:
        with _sigterm_like_control_c():
            command = _find(commands, words, path, program=program)
            if isinstance(command, dict):
                sys.stdout.write(_overview(command, path, program=program, summary=summary))
                return 0
            require(SMALL_EXTRAS.get(path[0], extra))
            return command(**_parse(command, words[len(path) :], program=" ".join([program, *path]))) or 0
    except KeyboardInterrupt:
        sys.stderr.write(f"{program}: interrupted\n")
        return 130
    except (BucketrankError, OSError, MemoryError, RuntimeError) as error:
        user_error = as_user_error(error)
        if user_error is None:
            raise
        command_name = " ".join(path) + ": " if path and user_error.names_command else ""
        sys.stderr.write(f"{program}: {command_name}{printable(user_error)}\n")
        return user_error.exit_status


@contextmanager
def _sigterm_like_control_c() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM, so that a stopped command removes its temporary files.

    Nothing changes outside the main thread, or if the process has its own handler.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _find(commands: Commands, words: list[str], path: list[str], *, program: str) -> Command | Commands:
    """Find the command in the words, and add its name to ``path``; return a group if its help is requested."""
    command: Command | Commands = commands
    while isinstance(command, dict):
        word = words[len(path)] if len(path) < len(words) else "--help"
        if word in ("-h", "--help"):
            return command
        if word not in command:
            typed = len(path) + 1
            path.clear()
            raise UsageError(_no_such_command(commands, words, typed, program=program))
        path.append(word)
        command = command[word]
    return command


def _parse(command: Command, words: list[str], *, program: str) -> dict[str, Any]:
    """Parse the words to keyword arguments of a command."""
    from bucketrank.settings.fields import FlagText, alternatives, convert
    from bucketrank.settings.flags import FlagParser, add_used_flags, flag_names, normalised

    parser = FlagParser(prog=program, description=inspect.getdoc(command))
    hints = get_type_hints(command, include_extras=True)
    flags = ["--help"]
    types: dict[str, tuple[str, Any]] = {}  # parameter -> its name in messages, and its type
    positional: list[str] = []
    changes = None
    for name, parameter in inspect.signature(command).parameters.items():
        annotation, text = get_args(hints[name])
        if annotation == Changes:
            changes = name
            continue
        if type(None) in alternatives(annotation):  # None means that the argument is not given
            (annotation,) = (each for each in alternatives(annotation) if each is not type(None))
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY and not (name == DATA and _has_flag(words, DATA)):
            _add_positional(parser, parameter, annotation, text)
            positional.append(name)
            flags += [f"--{DATA}"] if name == DATA else []
            added = []
        else:
            added = _add_flag(parser, parameter, annotation, text)
            flags += added
        types[name] = (added[0] if added else name, annotation)
    if changes is not None:
        words = [normalised(word) for word in words]
        flags += flag_names()
        if {"-h", "--help"} & {*words}:
            _show_settings(parser, words, dest=changes)
            names = " ".join(f"[{name}]" for name in positional)
            parser.usage = f"{program} {names} [options] [settings]"
        else:
            add_used_flags(parser, words, dest=changes)
    _require_no_pairs(words, flags)
    values, rest = parser.parse(words, flags)
    # argparse leaves out an optional positional argument that follows a flag.
    for name in positional:
        if name not in values and rest and not rest[0].startswith("-"):
            values[name] = rest.pop(0)
    if rest:
        raise UsageError(f"unrecognized arguments: {' '.join(rest)}")
    given = {} if changes is None else {changes: values.get(changes, {})}
    try:
        for name, (shown, annotation) in types.items():
            value = values.get(name)
            if isinstance(value, list):
                given[name] = [convert(FlagText(each), get_args(annotation)[0], name=shown) for each in value]
            elif value is not None:
                given[name] = convert(FlagText(value) if isinstance(value, str) else value, annotation, name=shown)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return given


def _require_no_pairs(words: list[str], flags: list[str]) -> None:
    """Raise UsageError at a word like ``epochs=1``, as other tools write settings."""
    for word in words:
        name, equals, value = word.partition("=")
        flag = f"--{name}"
        if equals and flag in flags and not Path(word).exists():
            raise UsageError(f"{printable(word)}: expected a flag; write {flag} {printable(value)}")


def _has_flag(words: list[str], name: str) -> bool:
    return any(word.partition("=")[0] == f"--{name}" for word in words)


def _add_positional(parser: FlagParser, parameter: inspect.Parameter, annotation: Any, text: str) -> None:
    count = "+" if get_origin(annotation) is list else "?" if parameter.default is None else None
    text += f" (also as --{DATA})" if parameter.name == DATA else ""
    parser.add_argument(parameter.name, nargs=count, default=argparse.SUPPRESS, help=text.replace("%", "%%"))


def _add_flag(parser: FlagParser, parameter: inspect.Parameter, annotation: Any, text: str) -> list[str]:
    """Add a keyword-only parameter of a command to its parser; return its flags."""
    from bucketrank.settings.fields import choices_of
    from bucketrank.settings.flags import metavar

    text = text.replace("%", "%%")
    flag = parameter.name.replace("_", "-")
    options: dict[str, Any] = {"dest": parameter.name, "default": argparse.SUPPRESS}
    if annotation is bool:
        parser.add_argument(f"--{flag}", action=argparse.BooleanOptionalAction, help=text, **options)
        return [f"--{flag}", f"--no-{flag}"]
    if parameter.default not in (None, parameter.empty):
        text += f" ({parameter.default})"
    if choices_of(annotation):
        options["metavar"] = metavar(annotation)
    required = parameter.default is parameter.empty
    parser.add_value(f"--{flag}", annotation, help=text, required=required, **options)
    return [f"--{flag}"]


def _show_settings(parser: FlagParser, words: list[str], *, dest: str) -> None:
    """Add the settings of the recipe named among the words, for ``--help``."""
    from bucketrank.settings.flags import add_recipe_flags
    from bucketrank.settings.recipe import load_recipe, recipe_names

    known = recipe_names()
    named = (word for word in words if word in known or word.endswith((".yaml", ".yml")))
    name = next(named, SAMPLE_RECIPE)
    parser.epilog = f"The values in brackets are those of the recipe {name}."
    add_recipe_flags(parser, load_recipe(name), dest=dest)


def require(extra: str) -> None:
    """Raise MissingPackageError unless all packages of an extra are installed."""
    missing = [name for name in extra_packages(extra) if not _is_installed(name)]
    if missing:
        raise MissingPackageError(
            f'this command needs {" and ".join(missing)}; install with: pip install "bucketrank[{extra}]"'
        )


def extra_packages(extra: str) -> list[str]:
    """Return the packages in an extra of bucketrank, from the metadata of the installed package.

    >>> "pillow" in extra_packages("detect"), "onnx" in extra_packages("export"), "pillow" in extra_packages("export")
    (True, True, True)
    """
    try:
        requirements = metadata.requires("bucketrank") or []
    except metadata.PackageNotFoundError:  # a checkout on the path that is not installed
        return []
    packages: dict[str, None] = {}
    for match in map(REQUIREMENT.match, requirements):
        if match and match[3] == extra:
            nested = [each.strip() for each in (match[2] or "").split(",")] if match[1] == "bucketrank" else []
            packages |= dict.fromkeys([name for each in nested for name in extra_packages(each)] or [match[1]])
    return list(packages)


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:  # perhaps a variant like onnxruntime-gpu, with the same module
        return find_spec(package.replace("-", "_")) is not None
    return True


def require_device(device: str) -> None:
    """Raise UsageError unless torch can use the device."""
    from bucketrank.devices import resolve_device

    try:
        resolve_device(device)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def require_min(flag: str, value: float | None, minimum: int) -> None:
    """Raise UsageError if a flag is given with a value below ``minimum``."""
    if value is not None and value < minimum:
        raise UsageError(f"{flag}: expected at least {minimum}, got {value}")


def say_next(*words: object) -> None:
    """Print the command to go on with."""
    sys.stdout.write(f"Next: {printable(shlex.join(['bucketrank', *map(str, words)]))}\n")


def _leaves(commands: Commands, path: tuple[str, ...] = ()) -> list[tuple[str, Command]]:
    """Return all commands with their full names."""
    leaves = []
    for name, command in commands.items():
        if isinstance(command, dict):
            leaves += _leaves(command, (*path, name))
        else:
            leaves.append((" ".join((*path, name)), command))
    return leaves


def _overview(commands: Commands, path: list[str], *, program: str, summary: str) -> str:
    leaves = _leaves(commands, tuple(path))
    width = max(len(name) for name, _ in leaves)
    lines = [f"  {program} {name:<{width}}  {inspect.getdoc(command)}" for name, command in leaves]
    return "\n".join([summary, "", *lines, "", "Each command has --help.", ""])


def _no_such_command(commands: Commands, words: list[str], typed: int, *, program: str) -> str:
    # The next word gives a hint, too, as in "convret voc"; it may also be an argument, as in "trian my-data".
    meant = [" ".join(word for word in words[:end] if not word.startswith("-")) for end in (typed, typed + 1)]
    likeness = {
        name: max(difflib.SequenceMatcher(None, *pair).ratio() for pair in product(meant, (name, name.split()[-1])))
        for name, _ in _leaves(commands)
    }
    closest = max(likeness, key=lambda name: likeness[name])
    hint = f'the nearest is "{program} {closest}"' if likeness[closest] >= MIN_LIKENESS else f"see {program} --help"
    return f'there is no command "{" ".join(words[:typed])}"; {hint}'
