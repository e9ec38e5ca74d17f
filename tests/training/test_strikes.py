"""The kill test: a run is struck at a named moment, resumed, and ends with the bytes of an uninterrupted run.

These strikes take different paths through saving and resuming. ``python -m tests.soak strikes --named`` strikes at all
moments.
"""

from pathlib import Path

import pytest

from .strikes import Strike
from .struck_runs import KILL, TERM, content, log_of, require_same_end, run

ALONE = [
    Strike("reading the data", 1, KILL),  # an empty folder with a lock file
    Strike("in recipe.yaml", 1, KILL),  # half a temporary file, no run yet
    Strike("after recipe.yaml", 1, KILL),  # a run without environment, fingerprint and checkpoint
    Strike("a training step", 1, KILL),  # a described run without a checkpoint
    Strike("a training step", 5, KILL),  # rows after the last checkpoint
    Strike("in last.safetensors", 2, KILL),  # half a temporary checkpoint
    Strike("between the two renames of a checkpoint", 1, KILL),  # only the previous checkpoint
    Strike("in a row of train.csv", 4, KILL),  # half a row
    Strike("gathering the detections", 1, KILL),  # an epoch that is trained and not evaluated
    Strike("after a row of validation.csv", 2, KILL),  # an evaluation without its checkpoint
    Strike("in best.safetensors", 1, KILL),
    Strike("in weights.safetensors", 1, KILL),  # a finished run without its final weights
    Strike("a training step", 2, TERM),
    Strike("a batch of evaluation", 2, TERM),
]
TOGETHER = [
    Strike("a batch of evaluation", 2, KILL),
    Strike("a training step", 2, TERM),
]


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


@pytest.mark.slow
@pytest.mark.parametrize("strike", ALONE, ids=str)
def test_one_process(strike, whole, shapes, tmp_path):
    require_same_end(tmp_path / "run", shapes, strike, whole, processes=1)


@pytest.mark.slow
@pytest.mark.parametrize("strike", TOGETHER, ids=str)
def test_two_processes(strike, whole_of_two, shapes, tmp_path):
    require_same_end(tmp_path / "run", shapes, strike, whole_of_two, processes=2)
