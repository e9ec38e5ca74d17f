"""The ``bucketrank`` command: a dict from names to functions; a function's signature is its parser.

The help of a flag is the text in its ``Annotated`` type. What is heavy is imported by the command that needs it, so
that asking for help does not wait for torch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_type_hints

Command = Callable[..., None]
Commands = dict[str, Union[Command, "Commands"]]


class UsageError(Exception):
    """The command cannot do what was asked; the message says what to do instead."""


def bench_losses(
    *,
    quick: Annotated[bool, "a smaller grid and tighter limits: less than a minute on two cores"] = False,
    out: Annotated[Path, "directory for the JSON, the Markdown and the figure"] = Path("runs/bench-losses"),
    sizes: Annotated[str, "numbers of logits"] = "10K,100K,1M",
    percent: Annotated[str | None, "percentages of positives (0.1,1,2,5; --quick: 0.1,1,5)"] = None,
    repeats: Annotated[int | None, "rounds in which the contenders take turns (40; --quick: 20)"] = None,
    seed: Annotated[int, "of the synthetic logits"] = 0,
    device: Annotated[str, "a torch device, like cpu or cuda:0"] = "cpu",
    max_seconds_per_cell: Annotated[float | None, "skip what an estimate says takes longer (30; --quick: 1)"] = None,
    memory: Annotated[bool | None, "measure peak memory, in fresh processes (not by default with --quick)"] = None,
    large: Annotated[bool, "also run exact on 20 million logits: time, growth and memory"] = False,
) -> None:
    """Time, memory and operations of every ranking loss, by method and backend, against focal loss."""
    require("rich", "matplotlib")
    from rich.console import Console

    from bucketrank.bench.losses import run
    from bucketrank.bench.numbers import parse_size
    from bucketrank.bench.progress import Bar
    from bucketrank.bench.report import show, write
    from bucketrank.bench.study import QUICK, Settings

    given: dict[str, Any] = {"repeats": repeats, "max_seconds_per_cell": max_seconds_per_cell, "memory": memory}
    try:
        given["sizes"] = _listed("--sizes", sizes, parse_size)
        given["percent"] = None if percent is None else _listed("--percent", percent, float)
        chosen = (QUICK if quick else {}) | {name: value for name, value in given.items() if value is not None}
        settings = Settings(seed=seed, device=device, large=large, **chosen)
    except ValueError as error:
        raise UsageError(f"bench losses: {error}") from error

    console = Console()
    if not console.is_terminal:
        # Into a file or a log: as wide as the tables are.
        console = Console(width=160)
    with Bar(console) as progress:
        study = run(settings, progress)
    show(study, console)
    for path in write(study, out):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


COMMANDS: Commands = {
    "bench": {
        "losses": bench_losses,
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except UsageError as error:
        sys.stderr.write(f"bucketrank: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("bucketrank: interrupted\n")
        return 130


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        from bucketrank import __version__

        sys.stdout.write(f"bucketrank {__version__}\n")
        return 0
    path: list[str] = []
    found: Command | Commands = COMMANDS
    while isinstance(found, dict):
        word = words[len(path)] if len(path) < len(words) else "--help"
        if word in ("-h", "--help"):
            sys.stdout.write(_overview(path, found))
            return 0
        if word not in found:
            raise UsageError(_no_such_command(words, len(path)))
        path.append(word)
        found = found[word]
    arguments = _parse(found, path, words[len(path) :])
    found(**arguments)
    return 0


def _parse(command: Command, path: list[str], words: list[str]) -> dict[str, Any]:
    require("jsonargparse")
    from jsonargparse import ActionYesNo, ArgumentParser

    program = " ".join(["bucketrank", *path])
    parser = ArgumentParser(prog=program, description=command.__doc__, formatter_class=argparse.HelpFormatter)
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind, text = get_args(hints[name])
        flag = "--" + name.replace("_", "-")
        if kind is not bool and parameter.default is not None:
            text += f" ({parameter.default})"
        if bool in (kind, *get_args(kind)):
            parser.add_argument(flag, action=ActionYesNo(no_prefix="no-"), default=parameter.default, help=text)
        else:
            parser.add_argument(flag, type=kind, default=parameter.default, help=text)
    return dict(vars(parser.parse_args(words)))


def require(*modules: str) -> None:
    """Says how to install what is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(f'this command needs {" and ".join(missing)}; install with: pip install "bucketrank[bench]"')


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


def _no_such_command(words: list[str], known: int) -> str:
    typed = " ".join(words[: known + 1])
    # With one word more: in "benhc losses" the second word tells what was meant.
    meant = " ".join(word for word in words[: known + 2] if not word.startswith("-"))
    names = [name for name, _ in _leaves(COMMANDS)]
    nearest = max(names, key=lambda name: difflib.SequenceMatcher(None, meant, name).ratio())
    return f'there is no command "{typed}"; the nearest is "bucketrank {nearest}"'


def _listed(flag: str, text: str, parse: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(parse(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{flag}: expected numbers with commas between, got {text!r}") from error


if __name__ == "__main__":
    sys.exit(main())
