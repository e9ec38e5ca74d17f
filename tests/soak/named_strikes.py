"""A strike into a run at every named moment; each run is then resumed and compared with an uninterrupted one.

The test suite has the strikes that take different paths (``tests/training/test_strikes.py``).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from bucketrank.data import write_shapes
from tests.training.strikes import Strike
from tests.training.struck_runs import KILL, TERM, content, require_same_end, run

START_UP = ["the lock", "reading the data", "the fingerprint", "building the detector", "reading a checkpoint"]
WRITES = ["before {}", "in {}", "before the rename of {}", "after {}"]
ROWS = ["before a row of {}", "in a row of {}", "after a row of {}"]


def moments(patterns: list[str], file: str, *counts: int) -> list[tuple[str, int]]:
    return [(pattern.format(file), count) for count in counts for pattern in patterns]


KILLED = [
    *[(moment, 1) for moment in START_UP],
    *moments(["in {}", "after {}"], "recipe.yaml", 1),
    *moments(["in {}", "after {}"], "environment.json", 1),
    *moments(["in {}", "after {}"], "data.safetensors", 1),
    ("the start of the loop", 1),
    ("a training step", 1),
    ("a training step", 5),
    *moments(WRITES, "last.safetensors", 1, 2, 4),
    ("between the two renames of a checkpoint", 1),
    ("between the two renames of a checkpoint", 4),
    *moments(["in {}"], "train.csv", 1),
    *moments(ROWS, "train.csv", 4),
    ("a batch of evaluation", 2),
    ("gathering the detections", 1),
    ("computing AP", 2),
    ("closing an epoch", 1),
    *moments(["in {}"], "validation.csv", 1),
    *moments(ROWS, "validation.csv", 2),
    *moments(WRITES, "best.safetensors", 1),
    *moments(WRITES, "weights.safetensors", 1),
    *moments(["in {}"], "curves.png", 1),
]
STOPPED = [
    *[(moment, 1) for moment in START_UP],
    ("in data.safetensors", 1),
    ("a training step", 2),
    ("in last.safetensors", 1),
    ("between the two renames of a checkpoint", 1),
    ("in a row of train.csv", 4),
    ("a batch of evaluation", 2),
    ("computing AP", 1),
    ("in best.safetensors", 1),
]
ONE_PROCESS = [Strike(*each, KILL) for each in KILLED] + [Strike(*each, TERM) for each in STOPPED]
TWO_PROCESSES = [
    Strike("building the detector", 1, KILL),
    Strike("in last.safetensors", 2, KILL),
    Strike("between the two renames of a checkpoint", 1, KILL),
    Strike("a batch of evaluation", 2, KILL),
    Strike("in weights.safetensors", 1, KILL),
    Strike("a training step", 2, TERM),
    Strike("between the two renames of a checkpoint", 1, TERM),
    Strike("a batch of evaluation", 1, TERM),
    Strike("computing AP", 1, TERM),
]


def strike_all_moments() -> Counter[str]:
    """Strike a run at every named moment; return the numbers of strikes."""
    results: Counter[str] = Counter()
    with TemporaryDirectory() as name:
        folder = Path(name)
        data = write_shapes(folder / "shapes", train=12, val=3, size=64, seed=0)
        for processes, strikes in ((1, ONE_PROCESS), (2, TWO_PROCESSES)):
            whole = folder / f"whole-{processes}"
            assert run(whole, data, processes=processes) == [0] * processes
            expected = content(whole)
            for number, strike in enumerate(strikes):
                sys.stderr.write(f"{strike}, {processes} processes\n")
                require_same_end(folder / f"run-{processes}-{number}", data, strike, expected, processes=processes)
                results[f"{strike.number.name}, {'one process' if processes == 1 else 'two processes'}"] += 1
    return results
