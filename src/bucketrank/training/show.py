"""What the commands ``train``, ``eval`` and ``recipes`` print."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketrank.training.recipe import dump, load, names, settings_of, text_of

if TYPE_CHECKING:
    from rich.console import Console

    from bucketrank.training.evaluate import Evaluation

NUMBER = r"(\d+\.\d+)"
PAPER = re.compile(rf"^# Paper: table (\d), (.+?): ((?:mask )?AP) {NUMBER}(.*)$", re.MULTILINE)
NUMBERS = {"AP50": rf"AP50 {NUMBER}", "AP75": rf"AP75 {NUMBER}", "seconds": rf"{NUMBER} s/iteration"}


@dataclass(frozen=True)
class Header:
    """How a recipe's file opens: the launch command, and the row of the paper it is for, if it is for one."""

    command: str
    notes: list[str]
    table: int | None = None
    row: str = ""
    kind: str = "AP"
    numbers: dict[str, str] | None = None


def header(name: str) -> Header:
    """Of a recipe in the package.

    >>> header("atss-r50-brs").numbers
    {'AP': '39.8', 'AP50': '58.8', 'AP75': '42.9', 'seconds': '0.15'}
    """
    text = text_of(name)
    comments = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    found = PAPER.search(text)
    if found is None:
        return Header(comments[0], comments[1:])
    numbers = {"AP": found[4]}
    for key, pattern in NUMBERS.items():
        if match := re.search(pattern, found[5]):
            numbers[key] = match[1]
    return Header(comments[0], comments[1:], int(found[1]), found[2], found[3], numbers)


def list_recipes() -> None:
    """All recipes with the paper's AP."""
    rows = [("recipe", "the paper's row", "AP there")]
    for name in names():
        head = header(name)
        about = f"table {head.table}: {head.row}" if head.table else head.notes[0].partition(":")[0]
        ap = (head.numbers or {}).get("AP", "")
        rows.append((name, about, f"{ap} (mask)" if head.kind.startswith("mask") else ap))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def markdown() -> str:
    """The table of docs/recipes.md."""
    lines = ["| recipe | the paper's row | AP | AP50 | AP75 | s/iteration |", "|---|---|---|---|---|---|"]
    rows = sorted((head.table or 9, name, head) for name in names() for head in [header(name)])
    for _, name, head in rows:
        if head.table is not None:
            numbers = head.numbers or {}
            cells = [numbers.get(key, "") for key in ("AP", "AP50", "AP75", "seconds")]
            cells[0] += " (mask)" if head.kind.startswith("mask") else ""
            lines.append(f"| `{name}` | table {head.table}, {head.row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def show_recipe(name: str, flags: list[str]) -> str:
    """A recipe's header and all its settings."""
    comments = [line for line in text_of(name).splitlines() if line.startswith("#")]
    return "\n".join([*comments, dump(load(name, flags))])


def help_on_settings(words: list[str]) -> str:
    """The settings of the recipe that is named among the words (or of the first one), for --help."""
    recipe = next((word for word in words if not word.startswith("-")), None)
    name = recipe if recipe in names() else "atss-r50-rs"
    values = load(name).flat()
    lines = [f"settings, as flags, with the values of {name}:"]
    for key, (_, _, text) in settings_of(values["detector.name"]).items():
        value = _short(values[key])
        lines.append(f"  --{key} {value}" + (f"  {text}" if text else ""))
    return "\n".join(lines)


def show_evaluation(console: Console, found: Evaluation) -> None:
    """COCO's table, and the AP of each class."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "boxes", *(["masks"] if found.masks else []), box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for key, value in found.boxes.metrics.items():
        masks = [_percent(found.masks.metrics[key])] if found.masks else []
        table.add_row(key, _percent(value), *masks)
    console.print(table)
    classes = Table("class", "AP", *(["mask AP"] if found.masks else []), box=None, padding=(0, 2, 0, 0))
    for name, value in found.boxes.per_class.items():
        classes.add_row(
            escape(name), _percent(value), *([_percent(found.masks.per_class[name])] if found.masks else [])
        )
    console.print(classes)
    console.print(
        f"{found.images:,} images; the best F1 is at a score of {found.threshold:.4g} "
        f"(stored with the weights: {found.meta.threshold:.4g})",
        highlight=False,
        soft_wrap=True,
    )


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f}"


def _short(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
