"""The CSV tables of a run, and their curves as a figure."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

from bucketrank.errors import DataError
from bucketrank.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from bucketrank.settings.choices import TRAIN_COLUMNS
from bucketrank.weights.atomic import disk_full_named, write, write_text

COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY)
SMOOTHED_POINTS = 40  # points per bold curve


class CsvTable:
    """A CSV file with a column ``step``, which grows during a run and is cut back to a checkpoint on resume."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []  # empty until the file is written or read

    def add(self, row: dict[str, float | int]) -> None:
        """Append a row; rewrite the file if the row has new columns. The row is flushed to the system on return."""
        cells = {name: _cell(value) for name, value in row.items()}
        if not set(cells) <= set(self._columns):
            rows = self.rows()
            known = list(rows[0]) if rows else []
            self._write([*known, *(name for name in cells if name not in known)], [*rows, cells])
            return
        with disk_full_named(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns, restval="", lineterminator="\n").writerow(cells)

    def rows(self) -> list[dict[str, str]]:
        """Return all rows as strings."""
        if not self.path.exists():
            return []
        try:
            with self.path.open(encoding="utf-8", newline="") as file:
                return [row for row in csv.DictReader(file) if (row.get("step") or "").isdecimal()]
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(
                f"{self.path}: expected the CSV table of a run, got a damaged file ({error}); delete it to continue "
                "without the earlier rows"
            ) from error

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of a column without its empty cells."""
        pairs = [(int(row["step"]), float(row[name])) for row in self.rows() if row.get(name)]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def cut(self, step: int) -> None:
        """Remove the rows after ``step``, and truncated rows."""
        self._replace([row for row in self._whole_rows() if int(row["step"]) <= step])

    def restart_epoch(self, epochs: int, *, old: int, new: int) -> None:
        """Keep the rows of the first ``epochs``, and rescale their steps from ``old`` to ``new`` steps per epoch.

        If several rows get the same step, the last one stays. Rows whose steps already lie in their epochs stay as they
        are, because a run that is killed before its next checkpoint does this twice.
        """
        rows = [row for row in self._whole_rows() if int(row["epoch"]) <= epochs]
        if any(math.ceil(int(row["step"]) / new) != int(row["epoch"]) for row in rows):
            steps = [str(math.ceil(int(row["step"]) * new / old)) for row in rows]
            rows = list({step: row | {"step": step} for step, row in zip(steps, rows, strict=True)}.values())
        self._replace(rows)

    def _whole_rows(self) -> list[dict[str, str]]:
        return [row for row in self.rows() if None not in row.values()]

    def _replace(self, rows: list[dict[str, str]]) -> None:
        if rows:
            self._write(list(rows[0]), rows)
        else:
            self.path.unlink(missing_ok=True)
            self._columns = []

    def _write(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())
        self._columns = columns


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.8g}"


def draw_curves(train: CsvTable, validation: CsvTable, path: Path) -> None:
    """Draw the losses on the left and AP on the right; write nothing without rows."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    from bucketrank.figures import INK, STYLE

    def means(steps: list[int], values: list[float]) -> list[list[float]]:
        parts = min(SMOOTHED_POINTS, len(steps))
        return [[float(np.mean(part)) for part in np.array_split(column, parts)] for column in (steps, values)]

    rows = train.rows()
    if not rows:
        return
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        terms = [name for name in rows[0] if name not in TRAIN_COLUMNS]
        for name, colour in zip(["loss", *terms], (INK, *COLOURS * 3), strict=False):
            steps, values = train.column(name)
            left.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
            left.plot(*means(steps, values), color=colour, label=name, linewidth=2.0 if name == "loss" else 1.2)
        left.set(xlabel="step", ylabel="loss, moving mean in bold", ylim=(0, None))
        left.legend(frameon=False, fontsize=7, ncols=2)
        evaluations = validation.rows()
        names = [name for name in (evaluations[0] if evaluations else {}) if name.endswith(("/AP", "/AP50", "/AP75"))]
        for name, colour in zip(names, COLOURS, strict=False):
            steps, values = validation.column(name)
            right.plot(steps, [100 * value for value in values], color=colour, label=name, marker="o", markersize=3)
        right.set(xlabel="step", ylabel="AP in per cent", ylim=(0, None))
        if names:
            right.legend(frameon=False, fontsize=7)
        write(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))
