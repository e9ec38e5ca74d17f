"""What is measured outside of the trainings, and kept in a file: the seconds of a step, and how gradients agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bucketrank.bench.timing import Samples
from bucketrank.study.grid import Row
from bucketrank.study.plan import Plan
from bucketrank.study.runs import Run, StudyError
from bucketrank.training.atomic import write_text

FILE = "steps.json"


@dataclass(frozen=True)
class Measured:
    """Of one detector: seconds by row and round, and how far the first gradients by two methods are apart, by loss."""

    samples: dict[str, Samples]
    gradients: dict[str, float]
    machine: dict[str, Any]


def measured(plan: Plan) -> dict[str, Measured]:
    """What the study's folder holds, by detector."""
    path = plan.out / FILE
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            detector: Measured(
                {key: {int(turn): value for turn, value in each.items()} for key, each in entry["samples"].items()},
                entry["gradients"],
                entry["machine"],
            )
            for detector, entry in stored.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StudyError(f"{path}: cannot be read ({error!r:.80}); remove it to time the steps again") from error


def measure(plan: Plan, *, rounds: int, say: Callable[[str], None]) -> dict[str, Measured]:
    """Measure what is not measured yet, detector by detector; the rows of a detector take turns."""
    found = measured(plan)
    for detector in dict.fromkeys(row.detector for row in plan.rows):
        rows = [row for row in plan.rows if row.detector == detector]
        known = found.get(detector)
        if known is not None and {row.key for row in rows} <= known.samples.keys():
            continue
        say(f"{detector}: {rounds} steps of each loss, in turn")
        found[detector] = _measure([_first(plan, row) for row in rows], rounds)
        write_text(plan.out / FILE, _to_json(found))
    return found


def _first(plan: Plan, row: Row) -> Run:
    """As the row's training begins, with its recipe's learning rate."""
    return plan.run(row, rate=plan.usual_rate(row), seed=0)


def _measure(runs: list[Run], rounds: int) -> Measured:
    from bucketrank.bench.machine import describe
    from bucketrank.study.steps import gradient_difference, time_steps

    machine = describe()
    methods = {(run.row.loss, run.row.method): run for run in runs if run.row.like is None}
    gradients = {
        loss: gradient_difference(methods[loss, "pairwise"], methods[loss, "exact"])
        for loss in ("rs", "ap")
        if {(loss, "pairwise"), (loss, "exact")} <= methods.keys()
    }
    return Measured(time_steps(runs, rounds=rounds), gradients, dict(machine))


def _to_json(found: dict[str, Measured]) -> str:
    return json.dumps({detector: vars(each) for detector, each in found.items()}, indent=1) + "\n"
