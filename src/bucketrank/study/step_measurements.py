"""Measurements of single steps, stored in ``steps.json``: seconds per step, and the differences of gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bucketrank.bench.timing import Samples
from bucketrank.study.run_record import portable_command
from bucketrank.study.study_run import StudyError, StudyRun
from bucketrank.weights.atomic import write_text

FILE = "steps.json"


@dataclass(frozen=True)
class StepMeasurements:
    """The measurements of one detector.

    ``samples`` are the seconds of a step by row and round. ``gradients`` are the relative differences between the
    first gradients of the exact and the pairwise method, by loss. ``commands`` are those of the timed runs, by row.
    """

    samples: dict[str, Samples]
    gradients: dict[str, float]
    machine: dict[str, Any]
    commands: dict[str, str] = field(default_factory=dict)

    def covers(self, runs: Sequence[StudyRun], *, rounds: int) -> bool:
        """Return whether these runs were timed with their present settings for as many rounds."""
        return all(
            self.commands.get(run.row.key) == portable_command(run) and len(self.samples[run.row.key]) == rounds
            for run in runs
        )


def load_measurements(out: Path) -> dict[str, StepMeasurements]:
    """Return the measurements in the folder of a study, by detector."""
    path = out / FILE
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
                entry.get("commands", {}),  # older files have none
            )
            for detector, entry in stored.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StudyError(f"{path}: cannot be read ({error!r:.80}); remove it to time the steps again") from error


def measure_steps(
    out: Path, runs: Mapping[str, Sequence[StudyRun]], *, rounds: int, say: Callable[[str], None]
) -> dict[str, StepMeasurements]:
    """Measure the steps of ``runs``, by detector; the runs of a detector take turns.

    Those that the file has with the same settings and number of rounds are not measured again.
    """
    measurements = load_measurements(out)
    for detector, own in runs.items():
        if detector in measurements and measurements[detector].covers(own, rounds=rounds):
            continue
        say(f"{detector}: {rounds} steps of each loss, in turn")
        measurements[detector] = _measure(own, rounds)
        write_text(out / FILE, _to_json(measurements))
    return measurements


def _measure(runs: Sequence[StudyRun], rounds: int) -> StepMeasurements:
    from bucketrank.provenance.machine import describe
    from bucketrank.study.first_steps import gradient_difference, time_steps

    machine = describe()
    methods = {(run.row.loss, run.row.method): run for run in runs if run.row.like is None}
    gradients = {
        loss: gradient_difference(methods[loss, "pairwise"], methods[loss, "exact"])
        for loss in ("rs", "ap")
        if {(loss, "pairwise"), (loss, "exact")} <= methods.keys()
    }
    commands = {run.row.key: portable_command(run) for run in runs}
    return StepMeasurements(time_steps(runs, rounds=rounds), gradients, dict(machine), commands)


def _to_json(measurements: dict[str, StepMeasurements]) -> str:
    return json.dumps({detector: vars(stored) for detector, stored in measurements.items()}, indent=1) + "\n"
