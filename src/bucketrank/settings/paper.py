"""Rows of the paper's tables: accuracy, seconds per iteration (T_iter) and hyper-parameters. Needs no torch.

All numbers of the paper in this project come from ``numbers.csv``. Its columns:

- ``table``: the paper's table; empty for numbers from the paper's text or from its LaTeX source.
- ``row``: the title of the row. ``detector`` is our name of the detector, ``loss`` the paper's name of the loss:
  RS and AP are computed by pairs, BRS and BAP are bucketed, CE is cross-entropy, focal is focal loss (for Co-DETR:
  its original losses).
- ``metric``: whether AP is of boxes or masks. For Cityscapes the paper suggests masks, but its values fit boxes: the
  published code lists a mask AP of 38.2 and 38.5.
- ``seconds``: T_iter on ``hardware``. ``hyperparameters``: the column #H of tables 7 and 8.
- ``recipe``: our recipe for the row. ``exact_recipe``: our recipe that trains the row with the exact loss instead.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

FORMATS = {"AP": ".1f", "AP50": ".1f", "AP75": ".1f", "seconds": ".2f"}
SCORE_BASED = ("CE", "focal")
BUCKETED = ("BRS", "BAP")


@dataclass(frozen=True)
class PaperRow:
    """One row of the paper's tables; ``numbers`` has AP, AP50, AP75 and seconds, as far as the paper gives them."""

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

    def title(self, recipe: str) -> str:
        """Return the title of the row, with a note if ``recipe`` trains it with the exact loss.

        >>> paper_row("atss-r50-rs").title("atss-r50-rs")
        'ATSS R-50 RS (pairwise there, exact here)'
        """
        if recipe != self.exact_recipe:
            return self.row
        return f"{self.row} ({'bucketed' if self.loss in BUCKETED else 'pairwise'} there, exact here)"

    def texts(self) -> dict[str, str]:
        """Return the numbers with the paper's decimals.

        >>> paper_row("faster-rcnn-r50-rs").texts()
        {'AP': '39.4', 'AP50': '59.5', 'AP75': '43.0', 'seconds': '0.50'}
        """
        return {name: format(value, FORMATS[name]) for name, value in self.numbers.items()}


@cache
def paper_rows() -> tuple[PaperRow, ...]:
    """Return all rows, in the order of the paper's tables."""
    text = resources.files(__package__).joinpath("numbers.csv").read_text(encoding="utf-8")
    return tuple(map(_row, csv.DictReader(text.splitlines())))


def paper_row(recipe: str) -> PaperRow | None:
    """Return the row that ``recipe`` trains, as the paper did or with the exact loss; None if it is for no row."""
    return next((row for row in paper_rows() if recipe and recipe in (row.recipe, row.exact_recipe)), None)


def _row(cells: dict[str, str]) -> PaperRow:
    return PaperRow(
        table=int(cells["table"]) if cells["table"] else None,
        row=cells["row"],
        detector=cells["detector"],
        backbone=cells["backbone"],
        dataset=cells["dataset"],
        loss=cells["loss"],
        metric=cells["metric"],
        numbers={name: float(cells[name]) for name in FORMATS if cells[name]},
        hyperparameters=int(cells["hyperparameters"]) if cells["hyperparameters"] else None,
        hardware=cells["hardware"],
        recipe=cells["recipe"],
        exact_recipe=cells["exact_recipe"],
    )
