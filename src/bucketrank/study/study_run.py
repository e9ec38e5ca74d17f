"""One run of a study: its folder, its command and its results. Nothing here needs torch."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucketrank.errors import RecipeError, short_repr
from bucketrank.settings import Recipe, load_recipe
from bucketrank.settings.recipe import differences, fixed_differences
from bucketrank.study.grid import Row
from bucketrank.training.csv_table import CsvTable

HOLDOUT = 0.2  # share of the training images that judges trials


# Settings that a resumed run may change, but on which the results of a study depend.
DECISIVE = ("backbone.weights", "init", "trainer.precision", "trainer.validate_every")


class StudyError(RuntimeError):
    """The study cannot continue; the message says what to do."""


def decisive_differences(before: Recipe, now: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ although the results depend on them; files are compared by their names."""
    changed = {key: each for key, each in differences(before, now).items() if key in DECISIVE}
    changed = {key: (old, new) for key, (old, new) in changed.items() if _file_name(old) != _file_name(new)}
    return fixed_differences(before, now) | changed


def _file_name(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) else value


@dataclass(frozen=True)
class StudyRun:
    """One call of ``bucketrank train`` with its own folder; ``out`` is the folder of the study.

    A ``trial`` helps to choose the learning rate and is judged by images that are held out of the training set.
    """

    row: Row
    recipe: str
    flags: tuple[str, ...]
    rate: float
    seed: int
    data: Path
    out: Path
    trial: bool = False
    length: float = 1.0  # number of steps, in multiples of those of a final run

    @property
    def name(self) -> str:
        """The name of the run and of its folder."""
        return f"{self.row.key}-lr{self.rate:g}-{self.ending}"

    @property
    def ending(self) -> str:
        """The end of the name: the seed, or that this is a trial."""
        return "trial" if self.trial else f"seed{self.seed}"

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.out / "runs" / self.name

    @property
    def settings(self) -> list[str]:
        """The flags for the recipe: those of the row, the learning rate and the seed."""
        return [*self.flags, "--schedule.lr", f"{self.rate:g}", "--trainer.seed", str(self.seed)]

    @property
    def arguments(self) -> list[str]:
        """The arguments of ``bucketrank``."""
        return ["train", self.recipe, "--data", str(self.data), "--out", str(self.folder), *self.settings]

    @property
    def command(self) -> str:
        """The shell command for this run alone."""
        return "bucketrank " + shlex.join(self.arguments)

    def load(self) -> Recipe:
        """Return the recipe with the flags applied."""
        return load_recipe(self.recipe, self.settings)

    @property
    def finished(self) -> bool:
        """Whether the run is finished; StudyError if its folder holds a run with other settings."""
        stored = self.folder / "recipe.yaml"
        if not stored.is_file():
            return False
        try:
            changed = decisive_differences(load_recipe(stored), self.load())
        except RecipeError as error:
            raise StudyError(f"{error}; remove {self.folder} to train it again") from error
        if changed:
            key, (old, new) = next(iter(changed.items()))
            raise StudyError(
                f"{self.folder}: expected a run with {key} {new!r}, got one with {old!r}; choose another --out, "
                "or remove the folder to train it again"
            )
        return (self.folder / "weights.safetensors").is_file() and bool(self.validation.rows())

    @property
    def validation(self) -> CsvTable:
        """The table of the evaluations during the run."""
        return CsvTable(self.folder / "validation.csv")

    @property
    def environment(self) -> dict[str, Any]:
        """The machine, versions and commit that the run was trained with."""
        path = self.folder / "environment.json"
        try:
            environment = json.loads(path.read_text(encoding="utf-8"))
        except (RecursionError, ValueError) as error:
            raise StudyError(
                f"{path}: expected JSON, got other content; remove the folder to train it again"
            ) from error
        if not isinstance(environment, dict):
            raise StudyError(
                f"{path}: expected the description of a run, got {short_repr(environment)}; remove the folder to train "
                "it again"
            )
        return environment

    def metric(self, name: str = "AP") -> float:
        """Return a metric of the last evaluation, from 0 to 100: of masks if the detector has them, else of boxes."""
        last = self.validation.rows()[-1]
        text = last.get(f"masks/{name}") or last.get(f"boxes/{name}")
        return 100 * float(text) if text else math.nan

    def curve(self) -> tuple[list[int], list[float]]:
        """Return the steps and the APs of all evaluations: of masks if the detector has them, else of boxes."""
        steps, values = self.validation.column("masks/AP")
        if not steps:
            steps, values = self.validation.column("boxes/AP")
        return steps, [100 * value for value in values]

    def box_curve(self) -> list[float]:
        """Return the APs of the boxes at all evaluations of a detector with masks; empty without masks."""
        return [100 * float(row["boxes/AP"]) for row in self.validation.rows() if row.get("masks/AP")]

    def step_seconds(self) -> list[tuple[int, float]]:
        """Return the logged intervals of the run: the number of steps and the seconds per step."""
        ends, logged = CsvTable(self.folder / "train.csv").column("seconds")
        return [(end - start, seconds) for start, end, seconds in zip([0, *ends], ends, logged, strict=False)]
