"""The record of a finished run: everything that tables and figures need, small enough for a JSON file.

With records, a study can be continued on another machine, where the folders of its finished runs do not exist.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bucketrank.errors import RecipeError
from bucketrank.evaluation import BootstrapAP
from bucketrank.evaluation.bootstrap import NUM_DRAWS
from bucketrank.settings import load_recipe
from bucketrank.study.study_run import StudyError, StudyRun, decisive_differences

MACHINE = ("commit", "modified", "processor", "date")  # what a record keeps of the machine
METRICS = ("AP", "AP50", "AP75", "oLRP")
TRAIN = "bucketrank train"


@dataclass(frozen=True)
class RunRecord:
    """The command, machine and results of a finished run; APs from 0 to 100.

    ``metrics``, ``curve``, ``bootstrap`` and ``class_ap`` are those of the masks if the detector has them; "box AP",
    ``box_curve`` and ``box_bootstrap`` are then those of its boxes. ``command`` names the data folder and the weights
    file without their folders. ``bootstrap`` holds, by step, the AP in the bootstrap draws of the validation images,
    and ``class_ap`` the AP of each class at the end, by its name; a trial has neither.
    """

    name: str
    command: str
    machine: Mapping[str, Any]
    metrics: Mapping[str, float]
    curve: tuple[list[int], list[float]]  # steps of the evaluations, and the AP of each
    bootstrap: Mapping[int, BootstrapAP] = field(default_factory=dict)
    class_ap: Mapping[str, float] = field(default_factory=dict)
    box_curve: list[float] = field(default_factory=list)  # at the steps of the curve
    box_bootstrap: Mapping[int, BootstrapAP] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        run: StudyRun,
        bootstrap: Mapping[int, BootstrapAP] | None = None,
        class_ap: Mapping[str, float] | None = None,
        box_bootstrap: Mapping[int, BootstrapAP] | None = None,
    ) -> RunRecord:
        """Return the record of the finished run in a folder."""
        metrics = {name: run.metric(name) for name in METRICS}
        box_curve = run.box_curve()
        return cls(
            run.name,
            portable_command(run),
            {name: run.environment[name] for name in MACHINE},
            metrics | {"box AP": box_curve[-1]} if box_curve else metrics,
            run.curve(),
            bootstrap or {},
            class_ap or {},
            box_curve,
            box_bootstrap or {},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        results: dict[str, Any] = {"metrics": self.metrics, "class_ap": self.class_ap, "curve": self.curve}
        results["bootstrap"] = _to_json(self.bootstrap)
        if self.box_curve:
            results |= {"box_curve": self.box_curve, "box_bootstrap": _to_json(self.box_bootstrap)}
        return {"name": self.name, "command": self.command, **self.machine, **results}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RunRecord:
        """Return a record from JSON; KeyError, TypeError or ValueError if it is not one."""
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
            before = load_recipe(recipe, flags)
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
    """Return the command of a run with names in place of this machine's folders."""
    arguments = [run.recipe, "--data", run.data.name, "--out", f"runs/{run.name}", *run.settings]
    weights = run.load().backbone.weights
    return f"{TRAIN} " + shlex.join(Path(word).name if word == weights else word for word in arguments)


def read_records(path: Path) -> dict[str, RunRecord]:
    """Return the records of a study's JSON file by the names of the runs; StudyError if it has none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        records = [RunRecord.from_json(each) for each in (*document["trials"], *document["runs"])]
    except OSError as error:
        raise StudyError(f"--merge: {path}: cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StudyError(f"--merge: {path}: expected the losses.json of a study, got something else") from error
    return {record.name: record for record in records}
