"""What the commands ``train``, ``eval`` and ``recipes`` print."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketrank.paper.paper_rows import PaperRow, paper_row
from bucketrank.training.recipe import dump, load, names, settings_of, text_of

if TYPE_CHECKING:
    from rich.console import Console

    from bucketrank.training.evaluate import Evaluation


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
    comments = [line.removeprefix("# ") for line in text_of(name).splitlines() if line.startswith("#")]
    return Header(comments[0], comments[1:])


def list_recipes() -> None:
    """Print all recipes with their rows of the paper and the paper's AP."""
    rows = [("recipe", "the paper's row", "AP there")]
    for name in names():
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
    rows = [(row.table, name, row) for name in names() if (row := paper_row(name)) is not None]
    for table, name, row in sorted(rows, key=lambda entry: entry[:2]):
        cells = [_ap(row), *(row.texts().get(key, "") for key in ("AP50", "AP75", "seconds"))]
        lines.append(f"| `{name}` | table {table}, {row.title(name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ap(row: PaperRow) -> str:
    ap = row.texts().get("AP", "")
    return f"{ap} (mask)" if row.metric == "mask" else ap


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
