"""The paper's numbers, and the recipe list that shows them. Needs no torch.

Every number of the paper that this project uses comes from ``paper.csv``. Its columns:

- ``table``: the paper's table; empty for numbers from the paper's text or from its LaTeX source.
- ``row``: the title of the row. ``detector`` is our name of the detector, ``loss`` the paper's name of the loss:
  RS and AP are computed by pairs, BRS and BAP are bucketed, CE is cross-entropy, focal is focal loss (for Co-DETR:
  its original losses).
- ``metric``: whether AP is of boxes or masks. For Cityscapes the paper suggests masks, but its values fit boxes: the
  published code lists a mask AP of 38.2 and 38.5.
- ``APs``, ``APm``, ``APl``: AP of small, medium and large objects.
- ``seconds``: T_iter on ``hardware``. ``hyperparameters``: the column #H of tables 7 and 8.
- ``recipe``: our recipe for the row. ``exact_recipe``: our recipe that trains the row with the exact loss instead.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from bucketrank.settings.recipe import load_recipe, recipe_names, recipe_text, recipe_to_yaml

SIZES = ("APs", "APm", "APl")  # AP of small, medium and large objects
FORMATS = {**dict.fromkeys(("AP", "AP50", "AP75", *SIZES), ".1f"), "seconds": ".2f"}
OPERATIONS = {"AP": 76_000_000, "BAP": 900_000}  # FLOPs in the supplement (S.3.2), which names no number of logits
SCORE_BASED = ("CE", "focal")
BUCKETED = ("BRS", "BAP")


@dataclass(frozen=True)
class PaperRow:
    """One row of the paper's tables.

    ``numbers`` has AP, AP50, AP75, AP by size and seconds, as far as the paper gives them.
    """

    table: int | None
    row: str
    detector: str
    backbone: str
    dataset: str
    loss: str
    metric: str
    numbers: dict[str, float]
    hyperparameters: int | None
    hardware: str
    recipe: str
    exact_recipe: str

    @property
    def place(self) -> str:
        """The part of the paper with the numbers: a table or its text."""
        return "text" if self.table is None else f"table {self.table}"

    @property
    def order(self) -> int:
        """The position in lists: rows from the text follow those of the tables."""
        return 99 if self.table is None else self.table

    def title(self, recipe: str) -> str:
        """Return the title of the row, with a note if ``recipe`` trains it with the exact loss.

        >>> paper_row("atss-r50-rs").title("atss-r50-rs")
        'ATSS R-50 RS (pairwise there, exact here)'
        """
        if recipe != self.exact_recipe:
            return self.row
        return f"{self.row} ({'bucketed' if self.loss in BUCKETED else 'pairwise'} there, exact here)"

    @property
    def ap(self) -> str:
        """AP with the paper's decimals, and the metric if there are masks; empty if the paper does not give it."""
        return self.texts().get("AP", "") + self.metric_mark

    @property
    def metric_mark(self) -> str:
        """The metric in parentheses if the detector has masks, so that it could be either."""
        return f" ({self.metric})" if self.detector == "mask_rcnn" else ""

    def texts(self) -> dict[str, str]:
        """Return the numbers with the paper's decimals.

        >>> paper_row("faster-rcnn-r50-rs").texts()
        {'AP': '39.4', 'AP50': '59.5', 'AP75': '43.0', 'seconds': '0.50'}
        """
        return {name: format(value, FORMATS[name]) for name, value in self.numbers.items()}


@cache
def paper_rows() -> tuple[PaperRow, ...]:
    """Return all rows, in the order of the paper's tables."""
    text = resources.files(__package__).joinpath("paper.csv").read_text(encoding="utf-8")
    return tuple(map(_row, csv.DictReader(text.splitlines())))


def paper_row(recipe: str) -> PaperRow | None:
    """Return the row that ``recipe`` reproduces, with the paper's loss or the exact one; None without such a row."""
    return next((row for row in paper_rows() if recipe and recipe in (row.recipe, row.exact_recipe)), None)


def _row(cells: dict[str, str]) -> PaperRow:
    counts: dict[str, Any] = {name: int(cells[name]) if cells[name] else None for name in ("table", "hyperparameters")}
    numbers = {name: float(cells[name]) for name in FORMATS if cells[name]}
    texts: dict[str, Any] = {name: text for name, text in cells.items() if name not in (*counts, *FORMATS)}
    return PaperRow(**texts, **counts, numbers=numbers)


# Recipes to start with: what each is good for. They are listed first, and again in their group.
START = {
    "atss-laptop": "trains on a CPU, from a backbone pretrained on ImageNet",
    "retinanet-coco": "fine-tunes torchvision's RetinaNet from COCO weights",
    "rf-detr-coco": "fine-tunes RF-DETR from COCO weights",
}
TITLES = {
    "start": "Start here: bucketrank train RECIPE DATA",
    "coco": "From COCO weights",
    "laptop": "For a laptop",
    "paper": "The paper's tables, with its AP",
}


def list_recipes() -> str:
    """Return the list of all recipes in groups: where to start, from COCO weights, for a laptop, from the paper."""
    names = recipe_names()
    groups: dict[str, list[tuple[str, str]]] = {"start": list(START.items())}
    for ending in ("coco", "laptop"):
        groups[ending] = [(name, _summary(name)) for name in names if name.endswith(f"-{ending}")]
    others = [name for name in names if not name.endswith(("-coco", "-laptop"))]
    groups["paper"] = [(name, _summary(name)) for name in sorted(others, key=_paper_order)]
    width = max(map(len, names))
    lines = [
        line
        for group, recipes in groups.items()
        for line in (TITLES[group], *(f"  {name:<{width}}  {text}" for name, text in recipes), "")
    ]
    return "\n".join([*lines, "All settings of a recipe: bucketrank recipes RECIPE", ""])


def _paper_order(name: str) -> tuple[int, str]:
    row = paper_row(name)
    return (row.order if row else 0, name)


def _summary(name: str) -> str:
    """Describe a recipe in one line: the paper's row and AP, or the detector, its input size and its length."""
    row = paper_row(name)
    if row is not None:
        numbers = f", AP {row.ap}" if "AP" in row.numbers else ""
        return f"{row.place}: {row.title(name)}{numbers}"
    recipe = load_recipe(name)
    parts = [recipe.detector.name, *([recipe.backbone_name] if recipe.backbone_name else [])]
    side = recipe.inputs.min_size
    if side is not None:
        parts.append(f"{side if isinstance(side, int) else max(side)} pixels")
    return ", ".join([*parts, f"{recipe.schedule.epochs} epochs", f"loss {recipe.loss.name}"])


def show_recipe(name: str, changes: Mapping[str, Any]) -> str:
    """Return the comments of a recipe file and all settings of the recipe."""
    comments = [line for line in recipe_text(name).splitlines() if line.startswith("#")]
    return "\n".join([*comments, recipe_to_yaml(load_recipe(name, changes))])
