"""The list of recipes with the paper's numbers."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bucketrank.paper.paper_rows import PaperRow, paper_row
from bucketrank.recipes.recipe_files import load_recipe, recipe_names, recipe_text, recipe_to_yaml


@dataclass(frozen=True)
class Header:
    """The comments that open a recipe file: the launch command, then notes for readers."""

    command: str
    notes: list[str]


def header(name: str) -> Header:
    """Return the header of a recipe in the package.

    >>> header("atss-r50-brs").command
    'bucketrank train atss-r50-brs --data COCO --trainer.devices 4'
    """
    comments = [line.removeprefix("# ") for line in recipe_text(name).splitlines() if line.startswith("#")]
    return Header(comments[0], comments[1:])


def list_recipes() -> None:
    """Print all recipes with their rows of the paper and the paper's AP."""
    rows = [("recipe", "the paper's row", "AP there")]
    for name in recipe_names():
        row = paper_row(name)
        if row is None:
            rows.append((name, header(name).notes[0].partition(":")[0], ""))
        else:
            rows.append((name, f"table {row.table}: {row.title(name)}", _ap(row)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def markdown() -> str:
    """Return the table of docs/recipes.md."""
    lines = ["| recipe | the paper's row | AP | AP50 | AP75 | s/iteration |", "|---|---|---|---|---|---|"]
    rows = [(row.table, name, row) for name in recipe_names() if (row := paper_row(name)) is not None]
    for table, name, row in sorted(rows, key=lambda entry: entry[:2]):
        cells = [_ap(row), *(row.texts().get(key, "") for key in ("AP50", "AP75", "seconds"))]
        lines.append(f"| `{name}` | table {table}, {row.title(name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def show_recipe(name: str, flags: list[str]) -> str:
    """Return the comments of a recipe's file and all its settings."""
    comments = [line for line in recipe_text(name).splitlines() if line.startswith("#")]
    return "\n".join([*comments, recipe_to_yaml(load_recipe(name, flags))])


def _ap(row: PaperRow) -> str:
    ap = row.texts().get("AP", "")
    return f"{ap} (mask)" if row.metric == "mask" else ap
