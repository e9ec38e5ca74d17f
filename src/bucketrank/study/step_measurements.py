"""Measurements of single steps, stored in ``steps.json``: seconds per step, and the differences of gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bucketrank.bench.timing import Samples
from bucketrank.model_files.atomic import write_text
from bucketrank.study.study_plan import StudyPlan
from bucketrank.study.study_run import StudyError, StudyRun

FILE = "steps.json"


@dataclass(frozen=True)
class StepMeasurements:
    """The measurements of one detector.

    ``samples`` are the seconds of a step by row and round. ``gradients`` are the relative differences between the
    first gradients of the exact and the pairwise method, by loss.
    """

    samples: dict[str, Samples]
    gradients: dict[str, float]
    machine: dict[str, Any]


def load_measurements(plan: StudyPlan) -> dict[str, StepMeasurements]:
    """Return the measurements in the folder of the study, by detector."""
    path = plan.out / FILE
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            detector: StepMeasurements(
                {
                    key: {int(turn): seconds for turn, seconds in samples.items()}
                    for key, samples in entry["samples"].items()
                },
                entry["gradients"],
                entry["machine"],
            )
            for detector, entry in stored.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StudyError(f"{path}: cannot be read ({error!r:.80}); remove it to time the steps again") from error


def measure_steps(plan: StudyPlan, *, rounds: int, say: Callable[[str], None]) -> dict[str, StepMeasurements]:
    """Measure the detectors that are not in the file yet; the rows of a detector take turns."""
    measurements = load_measurements(plan)
    for detector in dict.fromkeys(row.detector for row in plan.rows):
        rows = [row for row in plan.rows if row.detector == detector]
        stored = measurements.get(detector)
        if stored is not None and {row.key for row in rows} <= stored.samples.keys():
            continue
        say(f"{detector}: {rounds} steps of each loss, in turn")
        runs = [plan.run(row, rate=plan.usual_rate(row), seed=0) for row in rows]
        measurements[detector] = _measure(runs, rounds)
        write_text(plan.out / FILE, _to_json(measurements))
    return measurements


def _measure(runs: list[StudyRun], rounds: int) -> StepMeasurements:
    from bucketrank.provenance.machine import describe
    from bucketrank.study.first_steps import gradient_difference, time_steps

    machine = describe()
    methods = {(run.row.loss, run.row.method): run for run in runs if run.row.like is None}
    gradients = {
        loss: gradient_difference(methods[loss, "pairwise"], methods[loss, "exact"])
        for loss in ("rs", "ap")
        if {(loss, "pairwise"), (loss, "exact")} <= methods.keys()
    }
    return StepMeasurements(time_steps(runs, rounds=rounds), gradients, dict(machine))


def _to_json(measurements: dict[str, StepMeasurements]) -> str:
    return json.dumps({detector: vars(stored) for detector, stored in measurements.items()}, indent=1) + "\n"
