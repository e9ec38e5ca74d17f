"""The kill test: a run is struck at a named moment, resumed, and ends with the bytes of one that never was struck.

``pytest tests/training/test_strikes.py -v`` lists the moments; each is one strike.
"""

from pathlib import Path

import pytest

from .strikes import Strike
from .struck_runs import KILL, TERM, content, log_of, require_same, run

START_UP = ["the lock", "reading the data", "the fingerprint", "building the detector", "reading a checkpoint"]
WRITES = ["before {}", "in {}", "before the rename of {}", "after {}"]
ROWS = ["before a row of {}", "in a row of {}", "after a row of {}"]


def moments(patterns: list[str], file: str, *counts: int) -> list[tuple[str, int]]:
    return [(pattern.format(file), count) for count in counts for pattern in patterns]


ONE_PROCESS = [
    *[(moment, 1) for moment in START_UP],
    *moments(["in {}", "after {}"], "recipe.yaml", 1),
    *moments(["in {}", "after {}"], "environment.json", 1),
    *moments(["in {}", "after {}"], "data.safetensors", 1),
    ("the trainer's start", 1),
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
ALONE = [Strike(*each, KILL) for each in ONE_PROCESS] + [Strike(*each, TERM) for each in STOPPED]


@pytest.fixture(scope="module")
def whole(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(folder, shapes) == [0], log_of(folder)
    return content(folder)


@pytest.fixture(scope="module")
def whole_of_two(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(folder, shapes, processes=2) == [0, 0], log_of(folder)
    return content(folder)


def require_same_end(folder: Path, data: Path, strike: Strike, expected: dict[str, object], *, processes: int) -> None:
    codes = run(folder, data, strike=strike, processes=processes)
    if strike.number == KILL:
        assert codes[0] == -KILL, f"the test must bite: {log_of(folder)}"
    else:
        assert codes == [130, *[0] * (processes - 1)], log_of(folder)
        log = log_of(folder)
        assert log.count("bucketrank: stopped; ") == 1
        assert "Traceback" not in log
    assert run(folder, data, processes=processes) == [0] * processes, log_of(folder)
    require_same(folder, expected)


@pytest.mark.slow
@pytest.mark.parametrize("strike", ALONE, ids=str)
def test_one_process(strike, whole, shapes, tmp_path):
    require_same_end(tmp_path / "run", shapes, strike, whole, processes=1)


@pytest.mark.slow
@pytest.mark.parametrize("strike", TWO_PROCESSES, ids=str)
def test_two_processes(strike, whole_of_two, shapes, tmp_path):
    require_same_end(tmp_path / "run", shapes, strike, whole_of_two, processes=2)


def test_there_are_at_least_sixty_strikes():
    assert len([*ALONE, *TWO_PROCESSES]) >= 60
    assert len({*ALONE}) == len(ALONE)
