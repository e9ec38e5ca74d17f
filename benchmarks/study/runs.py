"""The runs of a study: folder, command and results of each, records for other machines, and the training queue.

Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.study.grid import Row
from bucketrank.errors import RecipeError, short_repr
from bucketrank.evaluation import BootstrapAP
from bucketrank.evaluation.bootstrap import NUM_DRAWS
from bucketrank.output import format_duration
from bucketrank.settings import Recipe, load_recipe, parse_flags
from bucketrank.settings.paper import SIZES
from bucketrank.settings.recipe import differences, fixed_differences
from bucketrank.training.log import CsvTable

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
    """Return the name of a file without its folder and without a prefix like ``mmdet:``."""
    return Path(value.rpartition(":")[2]).name if isinstance(value, str) else value


# Cached, because a plan asks each run many times for its status and settings.
@cache
def _load(recipe: str, settings: tuple[str, ...]) -> Recipe:
    return load_recipe(recipe, parse_flags(settings))


@cache
def _stored(path: Path, _modified: int) -> Recipe:
    return load_recipe(path)


class Choice(NamedTuple):
    """Settings that the trials choose; ``balanced`` is the box balance, None for the one of the recipe."""

    rate: float
    balanced: bool | None = None

    @property
    def boxes(self) -> str:
        """The box balance, for tables and folders."""
        return "published" if self.balanced is None else "balanced" if self.balanced else "fixed"


@dataclass(frozen=True)
class StudyRun:
    """One call of ``bucketrank train`` with its own folder; ``out`` is the folder of the study.

    A ``trial`` helps to choose the learning rate and is evaluated on images held out of the training set. A run
    with a ``record`` was finished elsewhere: it is not trained again, and its results are those of the record.
    """

    stem: str
    row: Row
    recipe: str
    flags: tuple[str, ...]
    choice: Choice
    seed: int
    data: Path
    out: Path
    trial: bool = False
    length: float = 1.0  # number of steps, as a multiple of a final run
    record: RunRecord | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The name of the run and of its folder."""
        return f"{self.stem}-trial" if self.trial else f"{self.stem}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.out / "runs" / self.name

    @property
    def settings(self) -> list[str]:
        """The flags for the recipe: those of the row, the learning rate and the seed."""
        return [*self.flags, "--schedule.lr", f"{self.choice.rate:g}", "--trainer.seed", str(self.seed)]

    @property
    def arguments(self) -> list[str]:
        """The arguments of ``bucketrank``."""
        return ["train", self.recipe, "--data", str(self.data), "--out", str(self.folder), *self.settings]

    @property
    def command(self) -> str:
        """The shell command that trains only this run."""
        return "bucketrank " + shlex.join(self.arguments)

    def load(self) -> Recipe:
        """Return the recipe with the flags applied."""
        return _load(self.recipe, tuple(self.settings))

    @property
    def finished(self) -> bool:
        """Whether the run is finished; StudyError if its folder holds a run with other settings."""
        if self.record is not None:
            return True
        stored = self.folder / "recipe.yaml"
        if not stored.is_file():
            return False
        try:
            changed = decisive_differences(_stored(stored, stored.stat().st_mtime_ns), self.load())
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

    def detections(self, step: int) -> Path:
        """Return the file with the detections of the evaluation after ``step``."""
        return self.folder / "detections" / f"{step}.json"

    @property
    def environment(self) -> Mapping[str, Any]:
        """The machine, versions and commit that the run was trained with."""
        if self.record is not None:
            return self.record.machine
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
        """Return a metric of the last evaluation, from 0 to 100; NaN if there is none.

        It is that of masks if the detector has them and the paper's AP for the row is that of masks, else of boxes.
        "mask AP" and "box AP" are the AP of either.
        """
        if self.record is not None:
            return self.record.metrics.get(name, math.nan)  # older records have no AP by size
        last = self.validation.rows()[-1]
        if name in EITHER:
            text = last.get(EITHER[name])
        else:
            text = (not self.row.of_boxes and last.get(f"masks/{name}")) or last.get(f"boxes/{name}")
        return 100 * float(text) if text else math.nan

    def curve(self) -> tuple[list[int], list[float]]:
        """Return the steps and the APs of all evaluations, of masks or boxes as in :meth:`metric`."""
        if self.record is not None:
            return self.record.curve
        steps, values = ([], []) if self.row.of_boxes else self.validation.column("masks/AP")
        if not steps:
            steps, values = self.validation.column("boxes/AP")
        return steps, [100 * value for value in values]

    def box_curve(self) -> list[float]:
        """Return the APs of the boxes at all evaluations of a detector with masks; empty without masks."""
        if self.record is not None:
            return self.record.box_curve
        return [100 * float(row["boxes/AP"]) for row in self.validation.rows() if row.get("masks/AP")]

    def step_seconds(self) -> list[tuple[int, float]]:
        """Return the logged intervals of the run, steps and seconds per step; a record has none."""
        ends, logged = CsvTable(self.folder / "train.csv").column("seconds")
        return [(end - start, seconds) for start, end, seconds in zip([0, *ends], ends, logged, strict=False)]


MACHINE = ("commit", "modified", "processor", "date")  # machine entries in a record
METRICS = ("AP", "AP50", "AP75", "oLRP")  # in every record
EITHER = {"mask AP": "masks/AP", "box AP": "boxes/AP"}  # AP of masks or boxes: its column in validation.csv
TRAIN = "bucketrank train"


@dataclass(frozen=True)
class RunRecord:
    """The record of a finished run for tables and figures: command, machine and results, with APs from 0 to 100.

    With records, a study continues on another machine, where the folders of its finished runs do not exist.

    ``metrics``, ``curve``, ``bootstrap`` and ``class_ap`` are those of the masks if the detector has them; "box AP",
    ``box_curve`` and ``box_bootstrap`` are then those of its boxes. In rows for which the paper has the AP of boxes,
    ``metrics`` and ``curve`` are those of the boxes, and "mask AP" that of the masks. ``command`` names the data folder
    and the weights files without their folders. ``bootstrap`` holds, by step, the AP in the bootstrap draws of the
    validation images, and ``class_ap`` the AP of each class at the end, by its name; a trial has neither.
    """

    name: str
    command: str
    machine: Mapping[str, Any]
    metrics: Mapping[str, float]
    curve: tuple[list[int], list[float]]  # steps of the evaluations, and the AP of each
    bootstrap: Mapping[int, BootstrapAP] = field(default_factory=dict)
    class_ap: Mapping[str, float] = field(default_factory=dict)
    box_curve: list[float] = field(default_factory=list)  # AP of the boxes at the steps of the curve
    box_bootstrap: Mapping[int, BootstrapAP] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        run: StudyRun,
        bootstrap: Mapping[int, BootstrapAP] | None = None,
        class_ap: Mapping[str, float] | None = None,
        box_bootstrap: Mapping[int, BootstrapAP] | None = None,
    ) -> RunRecord:
        """Return the record of a finished run: the one it has, or a new one from its folder."""
        if run.record is not None:
            return run.record
        sizes = {name: run.metric(name) for name in SIZES}
        metrics = {name: run.metric(name) for name in METRICS}
        metrics |= {name: ap for name, ap in sizes.items() if not math.isnan(ap)}  # NaN: no object of that size
        box_curve = run.box_curve()
        if box_curve:
            other = "mask AP" if run.row.of_boxes else "box AP"
            metrics[other] = run.metric(other)
        return cls(
            run.name,
            portable_command(run),
            {name: run.environment[name] for name in MACHINE},
            metrics,
            run.curve(),
            bootstrap or {},
            class_ap or {},
            box_curve,
            box_bootstrap or {},
        )

    def to_json(self) -> dict[str, Any]:
        """Convert the record to JSON."""
        results: dict[str, Any] = {"metrics": self.metrics, "class_ap": self.class_ap, "curve": self.curve}
        results["bootstrap"] = _to_json(self.bootstrap)
        if self.box_curve:
            results |= {"box_curve": self.box_curve, "box_bootstrap": _to_json(self.box_bootstrap)}
        return {"name": self.name, "command": self.command, **self.machine, **results}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RunRecord:
        """Parse a record; KeyError, TypeError or ValueError if it is invalid."""
        if not document["command"].startswith(f"{TRAIN} "):
            raise ValueError("not the record of a run")
        steps, aps = document["curve"]
        metrics = {name: float(value) for name, value in document["metrics"].items()}
        required = METRICS if document["bootstrap"] else METRICS[:1]  # older records of trials have no more
        if not set(required) <= metrics.keys() or not steps or len(steps) != len(aps) or steps != sorted({*steps}):
            raise ValueError("expected all metrics, and a curve with an AP at each of its steps")
        return cls(
            document["name"],
            document["command"],
            {name: document[name] for name in MACHINE},
            metrics,
            (steps, [float(ap) for ap in aps]),
            _from_json(document["bootstrap"]),
            # Older records have none of these.
            dict(document.get("class_ap", {})),
            list(document.get("box_curve", [])),
            _from_json(document.get("box_bootstrap", {})),
        )

    def require_same_settings(self, run: StudyRun) -> None:
        """Raise StudyError unless the record's run had the settings of ``run``."""
        try:
            recipe, _, _, _, _, *flags = shlex.split(self.command.removeprefix(TRAIN))
            before = load_recipe(recipe, parse_flags(flags))
        except (RecipeError, ValueError) as error:
            raise StudyError(f"--merge: {self.name}: {error}") from error
        changed = decisive_differences(before, run.load())
        if changed:
            key, (old, new) = next(iter(changed.items()))
            raise StudyError(
                f"--merge: {self.name}: expected a run with {key} {new!r}, got one with {old!r}; give the flags of "
                "that study, or leave its file out"
            )


def _to_json(bootstrap: Mapping[int, BootstrapAP]) -> dict[str, Any]:
    return {
        str(step): {"AP": round(each.ap, 6), "draws": [round(float(ap), 3) for ap in each.draws]}
        for step, each in bootstrap.items()
    }


def _from_json(document: Mapping[str, Any]) -> dict[int, BootstrapAP]:
    bootstrap = {
        int(step): BootstrapAP(float(each["AP"]), np.asarray(each["draws"], dtype=np.float64))
        for step, each in document.items()
    }
    if any(each.draws.shape != (NUM_DRAWS,) for each in bootstrap.values()):
        raise ValueError(f"expected {NUM_DRAWS} bootstrap draws")
    return bootstrap


def portable_command(run: StudyRun) -> str:
    """Format the command of a run without this machine's folders."""
    arguments = [run.recipe, "--data", run.data.name, "--out", f"runs/{run.name}", *run.settings]
    recipe = run.load()
    files = {file: _file_name(file) for file in (recipe.backbone.weights, recipe.init) if file is not None}
    words = (word.removesuffix(word.rpartition(":")[2]) + files[word] if word in files else word for word in arguments)
    return f"{TRAIN} " + shlex.join(words)


def read_records(path: Path) -> dict[str, RunRecord]:
    """Read the records in a study's JSON file, by run name; StudyError if it has none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        records = [RunRecord.from_json(each) for each in (*document["trials"], *document["runs"])]
    except OSError as error:
        raise StudyError(f"--merge: {path}: cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StudyError(f"--merge: {path}: expected the JSON file of a study, got something else") from error
    return {record.name: record for record in records}


INTERRUPTED = 130  # exit status of a run that Ctrl-C stopped
RESUME = "repeat the same command to resume"
MAX_SHOWN = 400  # maximum characters of a failed run's last line


class StoppedError(StudyError):
    """The study was stopped by Ctrl-C or SIGTERM; its run is finished or has a checkpoint to resume from."""


@dataclass
class RunQueue:
    """Train the runs of a study one after another, each in its own process, and skip finished ones.

    ``total`` is the number of all runs. ``failed`` holds the errors of failed runs by name.

    ``total_length``, the sum of all run lengths, gives the time left.
    """

    console: Console
    total: int
    total_length: float
    done: int = 0

    def __post_init__(self) -> None:
        self.failed: dict[str, str] = {}
        self._seen: set[str] = set()
        self._done_length = 0.0
        self._trained_length = 0.0  # only runs trained by this study
        self._seconds = 0.0  # training time of these runs

    def train(self, runs: Sequence[StudyRun]) -> None:
        """Train the runs that are not finished; a failure is recorded and the next run starts."""
        for run in runs:
            if run.name in self._seen:
                continue
            self._seen.add(run.name)
            if not run.finished:
                self._train(run)
            self.done += 1
            self._done_length += run.length
            outcome = self.failed.get(run.name) or f"AP {run.metric():.1f}"
            self._print(f"{self.done} of {self.total}  {run.name}  {outcome}{self._time_left()}")

    def _train(self, run: StudyRun) -> None:
        log = run.out / "logs" / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "bucketrank.cli", *run.arguments, "--resume"]
        with log.open("a", encoding="utf-8") as file, self._bar(run.name):
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            status, stopped = _wait(process)
        if stopped or status == INTERRUPTED:  # also if the run was about to end anyway
            raise StoppedError(f"stopped in {run.name}; {RESUME}")
        if status != 0:
            self.failed[run.name] = f"failed (see {log}): {_last_line(log)}"
            return
        self._seconds += time.monotonic() - began
        self._trained_length += run.length

    def _time_left(self) -> str:
        if not self._trained_length or self.done >= self.total:
            return ""
        left = self._seconds / self._trained_length * (self.total_length - self._done_length)
        return f"  {format_duration(left)} left"

    def _bar(self, name: str) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        bar.add_task(name, total=self.total, completed=self.done)
        return bar

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Return the exit status of the run and whether the study was asked to stop, after the run has ended its step.

    Ctrl-C reaches the run and the study. SIGTERM reaches only the study, which forwards it.
    """
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        while True:
            try:
                return process.wait(), stopped
            except KeyboardInterrupt:  # noqa: PERF203 (rare)
                stopped = True
    finally:
        signal.signal(signal.SIGTERM, before)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:MAX_SHOWN] if lines else "the log is empty"
