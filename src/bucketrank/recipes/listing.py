"""The list of recipes with the paper's numbers."""

from __future__ import annotations

import re
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
    """Return the tables of docs/recipes.md: exact recipes with pairwise and bucketed variants, then the others."""
    rows = {name: row for name in recipe_names() if (row := paper_row(name)) is not None}
    names = sorted(rows, key=lambda name: (rows[name].table or 0, name))
    exact = [name for name in names if name == rows[name].exact_recipe]
    lines = [
        "| exact recipe | the paper's table and row | AP, pairwise / bucketed | s/iteration, pairwise / bucketed |",
        "|---|---|---|---|",
    ]
    listed = set(exact)
    for name in exact:
        row, variants = rows[name], (f"{name}-pairwise", _bucketed(name))
        listed.update(variants)
        # The row may be of the bucketed loss: BRS, where the recipe has RS.
        title = row.row.replace(f" {row.loss}", f" {row.loss.removeprefix('B')}")
        texts = [rows[variant].texts() if variant in rows else {} for variant in variants]
        ap, seconds = (_pair([text.get(key, "") for text in texts]) for key in ("AP", "seconds"))
        lines.append(f"| `{name}` | {row.table}, {title} | {ap}{_metric(row)} | {seconds} |")
    lines += ["", "| recipe | the paper's table and row | AP | s/iteration |", "|---|---|---|---|"]
    for name in names:
        if name not in listed:
            row = rows[name]
            lines.append(f"| `{name}` | {row.table}, {row.row} | {_ap(row)} | {row.texts().get('seconds', '')} |")
    return "\n".join(lines) + "\n"


def _bucketed(exact: str) -> str:
    """Return the name of the bucketed recipe beside an exact one.

    >>> _bucketed("cascade-rcnn-r50-rs-36"), _bucketed("paa-r50-ap")
    ('cascade-rcnn-r50-brs-36', 'paa-r50-bap')
    """
    return re.sub(r"-(rs|ap)(?=-|$)", r"-b\1", exact)


def _pair(values: list[str]) -> str:
    """Return the values of the pairwise and of the bucketed recipe; a dash where the paper has none."""
    return " / ".join(value or "\N{EN DASH}" for value in values) if any(values) else ""


def show_recipe(name: str, flags: list[str]) -> str:
    """Return the comments of a recipe's file and all its settings."""
    comments = [line for line in recipe_text(name).splitlines() if line.startswith("#")]
    return "\n".join([*comments, recipe_to_yaml(load_recipe(name, flags))])


def _ap(row: PaperRow) -> str:
    return row.texts().get("AP", "") + _metric(row)


def _metric(row: PaperRow) -> str:
    return " (mask)" if row.metric == "mask" else ""
