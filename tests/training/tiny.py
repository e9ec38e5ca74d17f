"""Runs small enough for a test."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bucketrank.settings import Recipe, load_recipe, parse_flags
from bucketrank.training.loop import Loop
from bucketrank.training.run import RunResult, train

USUAL = """
  --backbone test_resnet --backbone.weights null --detector.channels 32 --inputs.min_size 64 --inputs.max_size 64
  --data.batch_size 4 --data.workers 0 --schedule.epochs 2 --schedule.policy steps
  --schedule.milestones 1 --schedule.lr 0.001 --schedule.base_batch 4 --schedule.clip 10 --trainer.log_every 1
  --trainer.deterministic --trainer.accelerator cpu --trainer.devices 1 --trainer.pictures 0
"""


def recipe(flags: str = "", *, name: str = "atss-laptop") -> Recipe:
    """Load a recipe with tiny settings."""
    return load_recipe(name, parse_flags([*USUAL.split(), *flags.split()]))


def run(folder: Path, data: Path, flags: str = "", *, resume: bool = False, **settings: Any) -> RunResult:
    """Train silently, with one thread."""
    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nowhere:
        return train(recipe(flags, **settings), data, folder, resume=resume, console=Console(file=nowhere))


def stop_in(patch: pytest.MonkeyPatch, *, step: int) -> None:
    """Press Ctrl-C in the middle of a step; the first is 0."""
    usual = Loop.compute_loss

    def pressed(loop, batch):
        if loop.progress.step == step:
            signal.raise_signal(signal.SIGINT)
        return usual(loop, batch)

    patch.setattr(Loop, "compute_loss", pressed)
