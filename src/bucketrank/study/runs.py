"""One training of a study: its folder, its command, and what came out of it. Nothing here needs torch."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucketrank.study.grid import Row
from bucketrank.training.recipe import Recipe, RecipeError, kept_differences, load
from bucketrank.training.table import Table


class StudyError(RuntimeError):
    """The study cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Run:
    """``bucketrank train`` in a folder of its own."""

    row: Row
    recipe: str
    flags: tuple[str, ...]
    rate: float
    seed: int
    data: Path
    out: Path  # of the study

    @property
    def name(self) -> str:
        """Of the folder."""
        return f"{self.row.key}-lr{self.rate:g}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.out / "runs" / self.name

    @property
    def settings(self) -> list[str]:
        """All flags that set something."""
        return [*self.flags, "--schedule.lr", f"{self.rate:g}", "--trainer.seed", str(self.seed)]

    @property
    def words(self) -> list[str]:
        """The arguments of ``bucketrank``."""
        return ["train", self.recipe, "--data", str(self.data), "--out", str(self.folder), *self.settings]

    @property
    def command(self) -> str:
        """What to type for this run alone."""
        return "bucketrank " + shlex.join(self.words)

    def load(self) -> Recipe:
        """The recipe with its flags."""
        return load(self.recipe, self.settings)

    @property
    def finished(self) -> bool:
        """Whether it has come to its end; StudyError if another training is in its folder."""
        stored = self.folder / "recipe.yaml"
        if not stored.is_file():
            return False
        try:
            changed = kept_differences(load(stored), self.load())
        except RecipeError as error:
            raise StudyError(f"{error}; remove {self.folder} to train anew") from error
        if changed:
            key, (old, new) = next(iter(changed.items()))
            raise StudyError(
                f"{self.folder}: was trained with {key} {old!r}, and this study wants {new!r}; choose another --out, "
                "or remove the folder to train anew"
            )
        return (self.folder / "weights.safetensors").is_file() and bool(self.validation.rows())

    @property
    def validation(self) -> Table:
        """The numbers of its evaluations."""
        return Table(self.folder / "validation.csv")

    @property
    def environment(self) -> dict[str, Any]:
        """What it ran on."""
        found: dict[str, Any] = json.loads((self.folder / "environment.json").read_text(encoding="utf-8"))
        return found

    def metric(self, name: str = "AP") -> float:
        """Of the last evaluation, from 0 to 100: of masks where there are any, otherwise of boxes."""
        last = self.validation.rows()[-1]
        text = last.get(f"masks/{name}") or last.get(f"boxes/{name}")
        return 100 * float(text) if text else math.nan

    def curve(self) -> tuple[list[int], list[float]]:
        """Steps and AP of all evaluations."""
        steps, values = self.validation.column("masks/AP")
        if not steps:
            steps, values = self.validation.column("boxes/AP")
        return steps, [100 * value for value in values]

    def step_seconds(self) -> list[tuple[int, float]]:
        """How many steps took how many seconds each, as the training wrote it down."""
        steps, each = Table(self.folder / "train.csv").column("seconds")
        return [(step - before, seconds) for before, step, seconds in zip([0, *steps], steps, each, strict=False)]
