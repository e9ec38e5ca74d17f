"""What the commands print about data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bucketrank.data.annotations import Split
from bucketrank.data.checking import Content, check, check_pair, relative
from bucketrank.data.convert.writer import Written
from bucketrank.data.folder import find_splits
from bucketrank.data.problems import DataError, Problem, counted


def check_folder(folder: Path, *, layout: str | None, masks: bool, decode: bool, show: int, workers: int | None) -> int:
    """Check every split of a folder and print what is wrong; returns 1 if there is an error, otherwise 0."""
    console = _console()
    splits = find_splits(folder, layout=layout)
    problems: list[Problem] = []
    both = splits.train is not None and splits.val is not None and splits.train.annotations == splits.val.annotations
    chosen = [replace(splits.train, part="all")] if both and splits.train else [each for each in splits if each]
    for split in chosen:
        found = _checked(split, console, masks=masks, decode=decode, workers=workers)
        _print_split(split, folder, console)
        problems += found
    if splits.train is not None and splits.val is not None and not any(each.severity == "error" for each in problems):
        problems += check_pair(Content.of(splits.train), Content.of(splits.val))
    if both:
        console.print("One file: a tenth of its images will be kept for validation.")
    if problems:
        _print_problems(problems, folder, console, show=show)
    errors = sum(problem.severity == "error" for problem in problems)
    warnings = len(problems) - errors
    end = "training refuses this data." if errors else "the data can be trained on."
    style = "bold red" if errors else "bold green"
    console.print(f"{counted(errors, 'error')}, {counted(warnings, 'warning')}: {end}", style=style, highlight=False)
    return int(errors > 0)


def convert_folder(convert: Callable[..., list[Written]], source: Path, folder: Path, *, copy: bool) -> None:
    """Convert, and print what was written and what to do next."""
    console = _console()
    with console.status(f"converting {escape(str(source))}"):
        written = convert(source, folder, copy=copy)
    table = Table("file", "images", "objects", "crowds")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in written:
        table.add_row(escape(str(each.annotations)), f"{each.images:,}", f"{each.objects:,}", f"{each.crowds:,}")
    console.print(table)
    console.print(f"Next: bucketrank check-data {folder}", highlight=False, markup=False, soft_wrap=True)


def _checked(split: Split, console: Console, *, masks: bool, decode: bool, workers: int | None) -> list[Problem]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"reading {escape(split.annotations.name)}", total=None)

        def advanced(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        depth = "pixels" if decode else "headers"
        return check(split, masks=masks, depth=depth, workers=workers, progress=advanced)  # type: ignore[arg-type]


def _print_split(split: Split, folder: Path, console: Console) -> None:
    name = split.annotations.relative_to(folder)
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
        console.print(f"{name}: {', '.join(parts)}", highlight=False, markup=False, soft_wrap=True)
    except (AttributeError, DataError, KeyError, TypeError):
        console.print(f"{name}: cannot be read as annotations", highlight=False, markup=False, soft_wrap=True)


def _print_problems(problems: list[Problem], folder: Path, console: Console, *, show: int) -> None:
    table = Table("", "kind", "file", "id", "what, and what to do", show_lines=False)
    table.columns[-1].overflow = "fold"
    shown: Counter[str] = Counter()
    left: dict[str, int] = defaultdict(int)
    for problem in sorted(problems, key=lambda each: each.severity):  # errors first, otherwise in order
        shown[problem.kind] += 1
        if shown[problem.kind] > show:
            left[problem.kind] += 1
            continue
        style = "red" if problem.severity == "error" else "yellow"
        cells = [problem.kind, relative(problem, folder), problem.id or "", problem.message]
        table.add_row(f"[{style}]{problem.severity}[/]", *map(escape, cells))
    console.print(table)
    for kind, count in left.items():
        console.print(f"... and {count:,} more of {kind} (--show {shown[kind]} lists them all)", highlight=False)


def _console() -> Console:
    console = Console()
    # Into a file or a log: as wide as the table is.
    return console if console.is_terminal else Console(width=160)
