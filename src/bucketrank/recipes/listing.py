"""The list of recipes with the paper's numbers."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from bucketrank.recipes import load_recipe, recipe_names, recipe_to_yaml
from bucketrank.recipes.recipe_files import recipe_text

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
    text = recipe_text(name)
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
    for name in recipe_names():
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
    rows = sorted((head.table or 9, name, head) for name in recipe_names() for head in [header(name)])
    for _, name, head in rows:
        if head.table is not None:
            numbers = head.numbers or {}
            cells = [numbers.get(key, "") for key in ("AP", "AP50", "AP75", "seconds")]
            cells[0] += " (mask)" if head.kind.startswith("mask") else ""
            lines.append(f"| `{name}` | table {head.table}, {head.row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def show_recipe(name: str, flags: list[str]) -> str:
    """A recipe's header and all its settings."""
    comments = [line for line in recipe_text(name).splitlines() if line.startswith("#")]
    return "\n".join([*comments, recipe_to_yaml(load_recipe(name, flags))])
