"""The tables of docs/recipes.md, from the recipes and the paper's numbers: ``python -m docs.figures.recipe_tables``."""

from __future__ import annotations

import re

from bucketrank.settings.paper import PaperRow, paper_row
from bucketrank.settings.recipe import recipe_names


def markdown() -> str:
    """Return both tables: exact recipes with pairwise and bucketed variants, then the others."""
    rows = {name: row for name in recipe_names() if (row := paper_row(name)) is not None}
    names = sorted(rows, key=lambda name: (rows[name].order, name))
    exact = [name for name in names if name == rows[name].exact_recipe]
    lines = [
        "| exact recipe | the paper's table and row | AP, pairwise / bucketed | s/iteration, pairwise / bucketed |",
        "|---|---|---|---|",
    ]
    listed = set(exact)
    for name in exact:
        row, variants = rows[name], (f"{name}-pairwise", _bucketed(name))
        listed.update(variants)
        # The paper's row may have the bucketed loss: BRS where the recipe has RS.
        title = row.row.replace(f" {row.loss}", f" {row.loss.removeprefix('B')}")
        texts = [rows[variant].texts() if variant in rows else {} for variant in variants]
        ap, seconds = (_pair([text.get(key, "") for text in texts]) for key in ("AP", "seconds"))
        lines.append(f"| `{name}` | {_place(row)}, {title} | {ap}{row.metric_mark} | {seconds} |")
    lines += ["", "| recipe | the paper's table and row | AP | s/iteration |", "|---|---|---|---|"]
    for name in names:
        if name not in listed:
            row = rows[name]
            lines.append(f"| `{name}` | {_place(row)}, {row.row} | {row.ap} | {row.texts().get('seconds', '')} |")
    return "\n".join(lines) + "\n"


def _place(row: PaperRow) -> str:
    return row.place.removeprefix("table ")


def _bucketed(exact: str) -> str:
    """Return the bucketed variant of an exact recipe.

    >>> _bucketed("cascade-rcnn-r50-rs-36"), _bucketed("paa-r50-ap")
    ('cascade-rcnn-r50-brs-36', 'paa-r50-bap')
    """
    return re.sub(r"(?<![a-z])(rs|ap)(?=-|$)", r"b\1", exact)


def _pair(values: list[str]) -> str:
    """Join the values of the pairwise and the bucketed recipe; a dash marks a missing one."""
    return " / ".join(value or "\N{EN DASH}" for value in values) if any(values) else ""


if __name__ == "__main__":
    print(markdown())
