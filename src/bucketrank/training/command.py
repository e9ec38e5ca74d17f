"""The command ``train``: a run, and what to say when it ends before its time."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from bucketrank.data import DataError
from bucketrank.training.checkpoint import CheckpointError
from bucketrank.training.keeper import Interrupted
from bucketrank.training.module import NonFiniteLossError
from bucketrank.training.recipe import Recipe, RecipeError
from bucketrank.training.run import train
from bucketrank.training.weights import WeightsError

MEMORY = (
    "a smaller --data.batch_size (the learning rate follows) or --inputs.max_size, or --backbone.checkpointing true"
)


def run(recipe: Recipe | None, data: Path | None, out: Path, *, resume: bool) -> int:
    """Train; returns the exit status."""
    go_on = f"go on with: bucketrank train --resume --out {out}"
    try:
        train(recipe, data, out, resume=resume)
    except Interrupted:
        sys.stderr.write(f"bucketrank: stopped; {go_on}\n")
        return 130
    except RecipeError as error:
        sys.stderr.write(f"bucketrank: train: {error}\n")
        return 2
    except (CheckpointError, NonFiniteLossError, WeightsError) as error:
        raise DataError(f"train: {error}") from error
    except torch.OutOfMemoryError as error:
        raise DataError(
            f"train: the device is out of memory; in a new run {MEMORY} needs less ({_first_line(error)})"
        ) from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        told = f"a process that reads pictures has died, often for want of memory ({_first_line(error)})"
        raise DataError(f"train: {told}; fewer --data.workers need less; {go_on}") from error
    return 0


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
