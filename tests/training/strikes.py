"""Signals that a run sends to itself at named moments."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bucketrank.cli import main
from bucketrank.evaluation import Evaluator
from bucketrank.training import log, run
from bucketrank.training.checkpoints import Checkpoints
from bucketrank.training.log import CsvTable
from bucketrank.training.loop import Loop
from bucketrank.training.processes import SIGNALS
from bucketrank.weights import atomic

from . import tiny

# Moments by name: a signal comes before the call of a function.
CALLS: dict[str, tuple[Any, str]] = {
    "the lock": (run, "lock_run_folder"),
    "reading the data": (run, "RunData"),
    "the fingerprint": (run, "fingerprint_of"),
    "building the detector": (run, "build_detector"),
    "reading a checkpoint": (Checkpoints, "load"),
    "the start of the loop": (Loop, "run"),
    "a training step": (Loop, "compute_loss"),
    "a batch of evaluation": (Loop, "evaluate_batch"),
    "gathering the detections": (Evaluator, "gather"),
    "computing AP": (Evaluator, "metrics"),
    "closing an epoch": (Loop, "close_epoch"),
}


@dataclass(frozen=True)
class Strike:
    """A signal that comes ``delay`` seconds after the ``count``-th time that a run reaches ``moment``."""

    moment: str
    count: int
    number: signal.Signals
    delay: float = 0.0

    def __str__(self) -> str:
        delay = f" + {self.delay:.3f} s" if self.delay else ""
        return f"{self.number.name} at {self.moment} #{self.count}{delay}"


class Striker:
    """Sends the signal of a strike to this process."""

    def __init__(self, strike: Strike) -> None:
        self.strike, self.remaining = strike, strike.count

    def at(self, moment: str, before: Callable[[], object] = lambda: None) -> None:
        """Strike if this is the moment; ``before`` prepares what a killed process leaves."""
        number, delay = self.strike.number, self.strike.delay
        if moment == self.strike.moment:
            self.remaining -= 1
            if self.remaining == 0 and delay:
                timer = threading.Timer(delay, os.kill, (os.getpid(), number))
                timer.daemon = True
                timer.start()
            elif self.remaining == 0:
                if number == signal.SIGKILL:
                    before()
                os.kill(os.getpid(), number)

    def install(self) -> None:
        """Put the moments into the functions of a run."""
        for moment, (owner, name) in CALLS.items():
            setattr(owner, name, self._announced(getattr(owner, name), moment))
        for module in (atomic, log):
            module.write = self._watched(module.write)  # type: ignore[attr-defined]
        usual, add = Path.replace, CsvTable.add

        def replace(path: Path, target: Path) -> Path:
            result = usual(path, target)
            if Path(target).name == "previous.safetensors":
                self.at("between the two renames of a checkpoint")
            return result

        def add_row(table: CsvTable, row: dict[str, float | int]) -> None:
            name, size = table.path.name, table.path.stat().st_size if table.path.exists() else 0
            self.at(f"before a row of {name}")
            add(table, row)
            self.at(f"in a row of {name}", lambda: os.truncate(table.path, (size + table.path.stat().st_size) // 2))
            self.at(f"after a row of {name}")

        Path.replace = replace  # type: ignore[method-assign,assignment]
        CsvTable.add = add_row  # type: ignore[method-assign,assignment]

    def _announced(self, usual: Any, moment: str) -> Any:
        def announced(*args: Any, **kwargs: Any) -> Any:
            self.at(moment)
            return usual(*args, **kwargs)

        return announced

    def _watched(self, usual: Callable[..., None]) -> Callable[..., None]:
        def write(path: Path, save: Callable[[Path], object], **more: Any) -> None:
            def halved(temporary: Path) -> None:
                save(temporary)
                self.at(f"in {path.name}", lambda: os.truncate(temporary, temporary.stat().st_size // 2))
                self.at(f"before the rename of {path.name}")

            self.at(f"before {path.name}")
            usual(path, halved, **more)
            self.at(f"after {path.name}")

        return write


def words_of(folder: Path, data: Path, *, processes: int) -> list[str]:
    """Return the arguments of the command that starts a run of six steps in two epochs, or resumes it."""
    words = ["train", "atss-laptop", "--resume", "--data", str(data), "--out", str(folder), *tiny.USUAL.split()]
    several = ["--trainer.devices", str(processes), "--trainer.strategy", "ddp"] if processes > 1 else []
    return [*words, "--inputs.min_size", "48,64", "--trainer.checkpoint_steps", "2", *several]


def start(words: list[str], log: Path, strike: Strike | None, rank: int, port: int) -> None:
    """Run the command in this process, one of several if there is a ``port``, and exit with its status."""
    if port:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    if rank:  # as if the first process had started this one
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    torch.set_num_threads(1)
    if strike is not None:
        Striker(strike).install()
    with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
        status = main(words)
    sys.exit(status)
