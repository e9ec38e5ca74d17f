"""CSV files that grow during a run and are cut back to a checkpoint when it resumes."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

from bucketrank.errors import DataError
from bucketrank.weights.atomic import disk_full_named, write_text


class CsvTable:
    """A CSV file with a column ``step``. A row has been handed to the system when ``add`` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []  # of the file; empty until it is written or read

    def add(self, row: dict[str, float | int]) -> None:
        """Append a row; one with new columns rewrites the file."""
        cells = {name: _cell(value) for name, value in row.items()}
        if not set(cells) <= set(self._columns):
            rows = self.rows()
            known = list(rows[0]) if rows else []
            self._write([*known, *(name for name in cells if name not in known)], [*rows, cells])
            return
        with disk_full_named(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns, restval="", lineterminator="\n").writerow(cells)

    def rows(self) -> list[dict[str, str]]:
        """Return all rows as texts."""
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
        """Return the steps and values of a column, where it has values."""
        pairs = [(int(row["step"]), float(row[name])) for row in self.rows() if row.get(name)]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def cut(self, step: int) -> None:
        """Remove the rows after ``step`` and rows that were cut off."""
        self._replace([row for row in self._whole_rows() if int(row["step"]) <= step])

    def restart_epoch(self, epochs: int, *, old: int, new: int) -> None:
        """Keep the rows of the first ``epochs``, with their steps scaled from ``old`` to ``new`` steps per epoch.

        Of rows that get the same step the last one stays. Nothing is scaled if every step already lies in its epoch: a
        run that was killed after this and before its next checkpoint is restored again.
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
