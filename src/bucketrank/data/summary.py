"""Run the commands check-data and convert, and print a summary."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bucketrank.data.annotations import Split, is_yaml
from bucketrank.data.checks import Content, check, check_pair
from bucketrank.data.convert.writer import Written
from bucketrank.data.layouts import find_splits
from bucketrank.data.problems import Problem, counted
from bucketrank.errors import DataError, printable
from bucketrank.output import progress_bar, say


def check_folder(folder: Path, *, layout: str | None, masks: bool, decode: bool, show: int, workers: int | None) -> int:
    """Check every split of a folder and print its problems; return 1 if there is an error, otherwise 0."""
    console = _console()
    splits = find_splits(folder, layout=layout)
    folder = folder.parent if is_yaml(folder) else folder
    problems: list[Problem] = []
    existing = [split for split in splits if split is not None]
    checked = list(dict.fromkeys(split.whole for split in existing))
    single = len(checked) < len(existing)  # both splits are parts of it
    for split in checked:
        problems += _check(split, console, masks=masks, decode=decode, workers=workers)
        _print_split(split, folder, console)
    if splits.train is not None and splits.val is not None and not any(each.severity == "error" for each in problems):
        problems += check_pair(Content.of(splits.train), Content.of(splits.val))
    if single:
        say(
            console,
            "No validation images: training keeps a tenth of the images for validation. To choose them by class:\n"
            f"bucketrank split {printable(folder)} NEW-FOLDER --val 0.2",
        )
    if problems:
        _print_problems(problems, folder, console, show=show)
    errors = sum(problem.severity == "error" for problem in problems)
    warnings = len(problems) - errors
    if errors:
        verdict = "training refuses this data."
    elif splits.train is None:
        verdict = "the data can be evaluated on; there are no images for training."
    else:
        verdict = "the data can be trained on."
    style = "bold red" if errors else "bold green"
    say(console, f"{counted(errors, 'error')}, {counted(warnings, 'warning')}: {verdict}", style=style)
    return int(errors > 0)


def convert_folder(convert: Callable[..., list[Written]], source: Path, folder: Path, *, copy: bool) -> None:
    """Convert a data set, print the files written, and suggest the next command."""
    console = _console()
    with console.status(f"converting {escape(printable(source))}"):
        written = convert(source, folder, copy=copy)
    table = Table("file", "images", "objects", "crowds")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in written:
        table.add_row(escape(printable(each.annotations)), f"{each.images:,}", f"{each.objects:,}", f"{each.crowds:,}")
    console.print(table)
    say(console, f"Next: bucketrank check-data {printable(folder)}")


def _check(split: Split, console: Console, *, masks: bool, decode: bool, workers: int | None) -> list[Problem]:
    with progress_bar(console) as bar:
        task = bar.add_task(f"reading {escape(printable(Path(split.name).name))}", total=None)
        return check(
            split,
            masks=masks,
            depth="pixels" if decode else "headers",
            workers=workers,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _print_split(split: Split, folder: Path, console: Console) -> None:
    name = printable(_relative(split.name, folder))
    try:
        document = split.read()
        annotations = document["annotations"]
        crowds = sum(bool(entry.get("iscrowd")) for entry in annotations)
        empty = len({image["id"] for image in document["images"]} - {entry["image_id"] for entry in annotations})
        parts = [
            counted(len(document["images"]), "image"),
            counted(len(annotations) - crowds, "object"),
            counted(crowds, "crowd"),
            counted(len(document["categories"]), "class", plural="classes"),
            f"{empty:,} without objects",
        ]
        say(console, f"{name}: {', '.join(parts)}")
    except (AttributeError, DataError, KeyError, TypeError):
        say(console, f"{name}: not counted, because of errors")


def _print_problems(problems: list[Problem], folder: Path, console: Console, *, show: int) -> None:
    table = Table("", "code", "file", "id", "problem and remedy", show_lines=False)
    table.columns[-1].overflow = "fold"
    shown: Counter[str] = Counter()
    hidden: dict[str, int] = defaultdict(int)
    for problem in sorted(problems, key=lambda each: each.severity):  # errors first, otherwise in file order
        shown[problem.code] += 1
        if shown[problem.code] > show:
            hidden[problem.code] += 1
            continue
        style = "red" if problem.severity == "error" else "yellow"
        cells = [problem.code, _relative(problem.file, folder), problem.id or "", problem.message]
        table.add_row(f"[{style}]{problem.severity}[/]", *(escape(printable(cell)) for cell in cells))
    console.print(table)
    for code, count in hidden.items():
        console.print(f"... and {count:,} more of {code} (--show {shown[code]} lists them all)", highlight=False)


def _relative(file: str, folder: Path) -> str:
    path = Path(file)
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else file


def _console() -> Console:
    console = Console()
    # A file or a log gets a fixed width that fits the table.
    return console if console.is_terminal else Console(width=160)
