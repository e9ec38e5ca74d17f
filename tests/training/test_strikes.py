"""The kill test: a run is struck at a named moment, resumed, and ends with the bytes of one that never was struck.

``pytest tests/training/test_strikes.py -v`` lists the moments; each is one strike.
"""

import csv
import multiprocessing
import signal
import socket
from pathlib import Path

import pytest

from bucketrank.training.run_lock import LOCK

from . import strikes

FLAGS = "--inputs.min_size 48,64 --trainer.checkpoint_steps 2"  # six steps in two epochs
KILL, TERM = signal.SIGKILL, signal.SIGTERM
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
    ("building the detector", 1, KILL),
    ("in last.safetensors", 2, KILL),
    ("between the two renames of a checkpoint", 1, KILL),
    ("a batch of evaluation", 2, KILL),
    ("in weights.safetensors", 1, KILL),
    ("a training step", 2, TERM),
    ("between the two renames of a checkpoint", 1, TERM),
    ("a batch of evaluation", 1, TERM),
    ("computing AP", 1, TERM),
]
ALONE = [(*each, KILL) for each in ONE_PROCESS] + [(*each, TERM) for each in STOPPED]


def named(strike: tuple[str, int, signal.Signals]) -> str:
    moment, count, number = strike
    return f"{number.name} at {moment} #{count}"


def run(folder: Path, data: Path, *, strike=None, processes: int = 1) -> list[int | None]:
    """Start the processes of a run, new ones with everything imported; return their exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([strikes.__name__])
    port = 0
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        log = folder.parent / f"{folder.name}-rank{rank}.log"
        own = strike if rank == 0 else None
        started.append(context.Process(target=strikes.start, args=(folder, data, FLAGS, log, own, rank, port)))
        started[-1].start()
    started[0].join(120)
    for process in started:
        if started[0].exitcode == -KILL:
            process.kill()
        process.join(60)
        if process.exitcode is None:
            process.kill()
            process.join()
    return [process.exitcode for process in started]


def log_of(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.parent.glob(f"{folder.name}-rank*.log")))


def content(folder: Path) -> dict[str, object]:
    """All files of a run without the times, and without the lock, whose content is the last process."""
    files: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name != LOCK:
            files[name] = path.read_bytes() if path.suffix == ".safetensors" and "checkpoints" not in name else None
        if path.suffix == ".csv":
            with path.open(encoding="utf-8") as file:
                files[name] = [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]
    return files


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


def require_same_end(folder: Path, data: Path, strike, expected: dict[str, object], *, processes: int) -> None:
    number = strike[2]
    codes = run(folder, data, strike=strike, processes=processes)
    if number == KILL:
        assert codes[0] == -KILL, f"the test must bite: {log_of(folder)}"
    else:
        assert codes == [130, *[0] * (processes - 1)], log_of(folder)
        log = log_of(folder)
        assert log.count("bucketrank: stopped; ") == 1
        assert "Traceback" not in log
    assert run(folder, data, processes=processes) == [0] * processes, log_of(folder)
    ended = content(folder)
    assert ended.keys() == expected.keys(), "nothing is left over, nothing is missing"
    assert [name for name, value in expected.items() if ended[name] != value] == []


@pytest.mark.slow
@pytest.mark.parametrize("strike", ALONE, ids=named)
def test_one_process(strike, whole, shapes, tmp_path):
    require_same_end(tmp_path / "run", shapes, strike, whole, processes=1)


@pytest.mark.slow
@pytest.mark.parametrize("strike", TWO_PROCESSES, ids=named)
def test_two_processes(strike, whole_of_two, shapes, tmp_path):
    require_same_end(tmp_path / "run", shapes, strike, whole_of_two, processes=2)


def test_there_are_at_least_sixty_strikes():
    names = [named(strike) for strike in (*ALONE, *TWO_PROCESSES)]
    assert len(names) >= 60
    assert len({*map(named, ALONE)}) == len(ALONE)
