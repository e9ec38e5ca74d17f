"""A run folder as ``bucketrank train`` writes it, read with what is there; what is missing is told."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bucketrank.data.problems import DataError, counted
from bucketrank.training.recipe import Recipe, RecipeError, load

NEEDED = "recipe.yaml"  # what makes a folder a run
NOT_NUMBERS = (OSError, UnicodeDecodeError, csv.Error)


@dataclass(frozen=True)
class Columns:
    """A CSV file of numbers: a list for each column, NaN where a cell is empty."""

    steps: list[int] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def pairs(self, name: str) -> list[tuple[int, float]]:
        """Steps and values of a column, where it has finite ones."""
        column = self.values.get(name, [])
        return [(step, value) for step, value in zip(self.steps, column, strict=False) if math.isfinite(value)]

    def last(self) -> dict[str, float]:
        """The last row."""
        return {name: column[-1] for name, column in self.values.items() if column}


@dataclass(frozen=True)
class RunFolder:
    """What a run left behind. ``gaps`` are sentences about what is missing and how to get it."""

    name: str
    path: Path
    recipe: Recipe
    environment: dict[str, Any]
    train: Columns
    validation: Columns
    weights: Path | None
    gaps: list[str]

    @property
    def data(self) -> Path | None:
        """The data it was trained on, as the folder tells."""
        found = self.environment.get("data")
        return Path(found) if isinstance(found, str) and found else None


def read_folders(paths: Sequence[Path]) -> list[RunFolder]:
    """All runs, each under a name of its own; DataError if one is no run."""
    if not paths:
        raise DataError("report: expected at least one run folder, got none; bucketrank train writes them")
    return [read_folder(path, name=name) for path, name in zip(paths, short_names(paths), strict=True)]


def read_folder(path: Path, *, name: str | None = None) -> RunFolder:
    """The run in a folder; DataError if it holds none."""
    path = Path(path)
    if path.is_file():
        raise DataError(f"{path}: expected the folder of a run, got a file; give the folder it lies in: {path.parent}")
    if not path.is_dir():
        raise DataError(f"{path}: there is no such folder; give the folder of a run, the --out of bucketrank train")
    if not (path / NEEDED).is_file():
        raise DataError(
            f"{path}: expected the folder of a run, got one without {NEEDED}; give the --out of bucketrank train"
        )
    try:
        recipe = load(path / NEEDED)
    except (RecipeError, OSError) as error:
        raise DataError(f"{error}; the run's settings cannot be read: take the folder as training wrote it") from error
    gaps: list[str] = []
    return RunFolder(
        name=name or path.resolve().name,
        path=path,
        recipe=recipe,
        environment=_environment(path / "environment.json", gaps),
        train=_columns(path / "train.csv", gaps),
        validation=_columns(path / "validation.csv", gaps),
        weights=_weights(path, gaps),
        gaps=gaps,
    )


def short_names(paths: Sequence[Path]) -> list[str]:
    """The folders' own names, with as many of those above as tell them apart.

    >>> short_names([Path("/a/atss/0"), Path("/a/atss/1"), Path("/b/paa/0")])
    ['atss/0', 'atss/1', 'paa/0']
    """
    parts = [Path(path).resolve().parts for path in paths]
    most = max(map(len, parts))
    for length in range(1, most + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(each[-1:])} ({number})" for number, each in enumerate(parts, start=1)]  # one folder twice


def _environment(path: Path, gaps: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        gaps.append(f"There is no {path.name}: machine, commit and data are not known. Give the data by --data.")
        return {}
    except (OSError, ValueError) as error:
        gaps.append(f"{path.name} cannot be read ({error}): machine, commit and data are not known.")
        return {}
    if not isinstance(content, dict):
        gaps.append(f"{path.name} holds no description of a run: machine, commit and data are not known.")
        return {}
    return content


def _columns(path: Path, gaps: list[str]) -> Columns:
    """The rows that are whole; how many were not is told."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            head, *rows = list(csv.reader(file)) or [[]]
    except FileNotFoundError:
        gaps.append(f"There is no {path.name} yet: its curves appear once the run has written a row.")
        return Columns()
    except NOT_NUMBERS as error:
        gaps.append(f"{path.name} cannot be read ({error}): its curves are left out.")
        return Columns()
    if "step" not in head:
        gaps.append(f"{path.name} has no column step: its curves are left out.")
        return Columns()
    found: list[dict[str, float]] = []
    for row in rows:
        values = _numbers(head, row)
        if values is not None and math.isfinite(values["step"]):
            found.append(values)
    if len(found) < len(rows):
        gaps.append(f"{path.name}: {counted(len(rows) - len(found), 'row')} cannot be read and are left out.")
    found.sort(key=lambda row: row["step"])
    return Columns(
        [int(row["step"]) for row in found],
        {name: [row[name] for row in found] for name in head if name not in ("step", "")},
    )


def _numbers(head: list[str], row: list[str]) -> dict[str, float] | None:
    """An empty cell is NaN; None if the row is cut off or holds something else than numbers."""
    if len(row) != len(head):
        return None
    try:
        return {name: float(cell) if cell else math.nan for name, cell in zip(head, row, strict=True)}
    except ValueError:
        return None


def _weights(path: Path, gaps: list[str]) -> Path | None:
    final, best = path / "weights.safetensors", path / "best.safetensors"
    if final.is_file():
        return final
    if best.is_file():
        gaps.append("The run has not ended: measured are the weights of its best epoch so far, best.safetensors.")
        return best
    gaps.append("There are no weights yet, so only the curves can be shown. Go on with bucketrank train --resume.")
    return None
