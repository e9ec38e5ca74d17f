"""Signals that a run sends to itself at named moments."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from bucketrank.cli import main
from bucketrank.evaluation import Evaluator
from bucketrank.model_files import atomic
from bucketrank.training import run, run_keeper, training_curves
from bucketrank.training.checkpoints import Checkpoints
from bucketrank.training.csv_table import CsvTable
from bucketrank.training.detector_module import DetectorModule

from . import tiny

# Functions before whose call a signal may come.
CALLS: dict[str, tuple[Any, str]] = {
    "the lock": (run, "lock_run_folder"),
    "reading the data": (run, "DataModule"),
    "the fingerprint": (run, "fingerprint_of"),
    "building the detector": (run, "build_detector"),
    "reading a checkpoint": (Checkpoints, "load"),
    "the trainer's start": (run_keeper.RunKeeper, "on_train_start"),
    "a training step": (DetectorModule, "training_step"),
    "a batch of evaluation": (DetectorModule, "validation_step"),
    "gathering the detections": (Evaluator, "gather"),
    "computing AP": (Evaluator, "metrics"),
    "closing an epoch": (run_keeper.RunKeeper, "close_epoch"),
}


class Striker:
    """Sends ``number`` to this process at the ``count``-th time that ``moment`` comes."""

    def __init__(self, moment: str, count: int, number: signal.Signals) -> None:
        self.moment, self.count, self.number = moment, count, number

    def at(self, moment: str, before: Callable[[], object] = lambda: None) -> None:
        """Strike if this is the moment; ``before`` prepares what a killed process leaves."""
        if moment == self.moment:
            self.count -= 1
            if self.count == 0:
                if self.number == signal.SIGKILL:
                    before()
                os.kill(os.getpid(), self.number)

    def install(self) -> None:
        """Put the moments into the functions of a run."""
        for moment, (owner, name) in CALLS.items():
            setattr(owner, name, self._announced(getattr(owner, name), moment))
        for module in (atomic, training_curves):
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


def start(
    folder: Path,
    data: Path,
    flags: str,
    log: Path,
    strike: tuple[str, int, signal.Signals] | None,
    rank: int,
    port: int,
) -> None:
    """Run the command in this process, one of two if there is a ``port``, and exit with its status."""
    if port:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
        flags += " --trainer.devices 2 --trainer.strategy ddp"
    torch.set_num_threads(1)
    if strike is not None:
        Striker(*strike).install()
    words = ["train", "atss-laptop", "--resume", "--data", str(data), "--out", str(folder), *tiny.USUAL.split()]
    with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
        status = main([*words, *flags.split()])
    sys.exit(status)
