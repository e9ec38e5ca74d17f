"""Start runs in their own processes, strike them, and compare the files in their folders."""

from __future__ import annotations

import csv
import json
import multiprocessing
import signal
import socket
from multiprocessing.process import BaseProcess
from pathlib import Path

from PIL import Image

from bucketrank.training.folder import LOCK

from . import preloaded, strikes
from .strikes import Strike

KILL, TERM = signal.SIGKILL, signal.SIGTERM
LIMIT = 900.0  # seconds after which a run counts as stuck, even on a machine under load


def run(folder: Path, data: Path, *, strike: Strike | None = None, processes: int = 1) -> list[int | None]:
    """Run in new processes; return their exit codes."""
    return wait(start(folder, data, strike=strike, processes=processes))


def start(folder: Path, data: Path, *, strike: Strike | None = None, processes: int = 1) -> list[BaseProcess]:
    """Start the processes of a run, new ones with everything imported; the first gets the strike."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preloaded.__name__])
    port = 0
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    words = strikes.words_of(folder, data, processes=processes)
    started: list[BaseProcess] = []
    for rank in range(processes):
        log = folder.parent / f"{folder.name}-rank{rank}.log"
        own = strike if rank == 0 else None
        process = context.Process(target=strikes.start, args=(words, log, own, rank, port))
        process.start()
        started.append(process)
    return started


def wait(started: list[BaseProcess], *, patience: float = 60) -> list[int | None]:
    """Wait for the first process, then up to ``patience`` seconds for the others; return the exit codes.

    The others are killed if the first was killed, as its own launcher would do, or if they do not end.
    """
    started[0].join(LIMIT)
    for process in started:
        if started[0].exitcode == -KILL:
            process.kill()
        process.join(patience)
        if process.exitcode is None:
            process.kill()
            process.join()
    return [process.exitcode for process in started]


def logs_of(folder: Path) -> list[Path]:
    """Return the files with the output of a run's processes."""
    return sorted(folder.parent.glob(f"{folder.name}-rank*.log"))


def log_of(folder: Path) -> str:
    """Return the output of a run's processes."""
    return "\n".join(path.read_text() for path in logs_of(folder))


def content(folder: Path) -> dict[str, object]:
    """All files of a run without the times, and without the lock, whose content is the last process."""
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: _comparable(path) for name, path in paths.items() if name != LOCK}


def _comparable(path: Path) -> object:
    """Return what two runs with the same steps share in a file; the file must be complete."""
    if path.suffix == ".csv":
        with path.open(encoding="utf-8") as file:
            return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]
    if path.suffix == ".json":  # command, machine and versions
        return sorted(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".png":
        with Image.open(path) as image:
            image.load()
            return image.size
    return None if path.parent.name == "checkpoints" else path.read_bytes()


def require_same(folder: Path, expected: dict[str, object]) -> None:
    """Raise unless a run ended with the files of an undisturbed one, and no others."""
    ended = content(folder)
    assert ended.keys() == expected.keys(), "nothing is left over, nothing is missing"
    assert [name for name, value in expected.items() if ended[name] != value] == []


def require_same_end(folder: Path, data: Path, strike: Strike, expected: dict[str, object], *, processes: int) -> None:
    """Strike a run, resume it, and raise unless it ended with the files of an undisturbed one."""
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
