"""Read a run folder of ``bucketrank train``; missing or damaged files are described instead of refused."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bucketrank.data.problems import counted
from bucketrank.errors import DataError, RecipeError
from bucketrank.settings import Recipe, load_recipe

RECIPE_FILE = "recipe.yaml"  # the only file that a run folder must have
UNREADABLE = (OSError, UnicodeDecodeError, csv.Error)


@dataclass(frozen=True)
class Columns:
    """The columns of a numeric CSV file; empty cells are NaN."""

    steps: list[int] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def pairs(self, name: str) -> list[tuple[int, float]]:
        """Pair the steps of a column with its finite values."""
        column = self.values.get(name, [])
        return [(step, value) for step, value in zip(self.steps, column, strict=False) if math.isfinite(value)]

    def last(self) -> dict[str, float]:
        """Return the last row; empty if the file has no rows."""
        return {name: column[-1] for name, column in self.values.items() if column}


@dataclass(frozen=True)
class RunFolder:
    """The contents of a run folder; ``gaps`` has one sentence for each missing part and how to get it."""

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
        """The data set folder of the run; None if environment.json does not name it."""
        folder = self.environment.get("data")
        return Path(folder) if isinstance(folder, str) and folder else None


def read_folders(paths: Sequence[Path]) -> list[RunFolder]:
    """Read all run folders, each under a unique name; raise DataError if one is not a run folder."""
    if not paths:
        raise DataError("report: expected at least one run folder, got none; bucketrank train writes run folders")
    return [read_folder(path, name=name) for path, name in zip(paths, short_names(paths), strict=True)]


def read_folder(path: Path, *, name: str | None = None) -> RunFolder:
    """Read a run folder; raise DataError if ``path`` is not one."""
    if path.is_file():
        raise DataError(f"{path}: expected a run folder, got a file; give the folder that contains it: {path.parent}")
    if not path.is_dir():
        raise DataError(f"{path}: the folder does not exist; give a run folder, the --out of bucketrank train")
    if not (path / RECIPE_FILE).is_file():
        raise DataError(
            f"{path}: expected a run folder, got a folder without {RECIPE_FILE}; give the --out of bucketrank train"
        )
    try:
        recipe = load_recipe(path / RECIPE_FILE)
    except (RecipeError, OSError) as error:
        raise DataError(
            f"{error}; the settings of the run cannot be read: restore the file as bucketrank train wrote it"
        ) from error
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
    """Shorten folder paths to unique names, with as few parent folders as possible.

    >>> short_names([Path("/a/atss/0"), Path("/a/atss/1"), Path("/b/paa/0")])
    ['atss/0', 'atss/1', 'paa/0']
    """
    parts = [Path(path).resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(each[-1:])} ({number})" for number, each in enumerate(parts, start=1)]  # the same folder twice


def _environment(path: Path, gaps: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        gaps.append(f"{path.name} is missing: machine, commit and data are unknown. Give the data with --data.")
        return {}
    except (OSError, ValueError) as error:
        gaps.append(f"{path.name} cannot be read ({error}): machine, commit and data are unknown.")
        return {}
    if not isinstance(content, dict):
        gaps.append(f"{path.name} does not describe a run: machine, commit and data are unknown.")
        return {}
    return content


def _columns(path: Path, gaps: list[str]) -> Columns:
    """Read the complete rows; report the number of incomplete rows in ``gaps``."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            head, *rows = list(csv.reader(file)) or [[]]
    except FileNotFoundError:
        gaps.append(f"{path.name} does not exist yet: its curves appear once the run has written a row.")
        return Columns()
    except UNREADABLE as error:
        gaps.append(f"{path.name} cannot be read ({error}): its curves are omitted.")
        return Columns()
    if "step" not in head:
        gaps.append(f"{path.name} has no column step: its curves are omitted.")
        return Columns()
    parsed = [values for row in rows if (values := _numbers(head, row)) is not None]
    complete = sorted((row for row in parsed if math.isfinite(row["step"])), key=lambda row: row["step"])
    if len(complete) < len(rows):
        gaps.append(f"{path.name}: {counted(len(rows) - len(complete), 'row')} cannot be read.")
    return Columns(
        [int(row["step"]) for row in complete],
        {name: [row[name] for row in complete] for name in head if name not in ("step", "")},
    )


def _numbers(head: list[str], row: list[str]) -> dict[str, float] | None:
    """Parse the cells as numbers, empty cells as NaN; return None if the row is cut off or has other text."""
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
        gaps.append(
            "The run has not finished: this report measures best.safetensors, the weights of its best epoch so far."
        )
        return best
    gaps.append(
        "The run has no weights yet, so only its curves are shown. Continue the run with bucketrank train --resume."
    )
    return None
