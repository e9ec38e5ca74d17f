"""The command ``train``: a run, and what to say when it ends before its time."""

from __future__ import annotations

import sys
from pathlib import Path

from bucketrank.data import DataError
from bucketrank.training.checkpoint import CheckpointError
from bucketrank.training.keeper import Interrupted
from bucketrank.training.module import NonFiniteLossError
from bucketrank.training.recipe import Recipe, RecipeError
from bucketrank.training.run import train
from bucketrank.training.weights import WeightsError


def run(recipe: Recipe | None, data: Path | None, out: Path, *, resume: bool) -> int:
    """Train; returns the exit status."""
    try:
        train(recipe, data, out, resume=resume)
    except Interrupted:
        sys.stderr.write(f"bucketrank: stopped; go on with: bucketrank train --resume --out {out}\n")
        return 130
    except RecipeError as error:
        sys.stderr.write(f"bucketrank: train: {error}\n")
        return 2
    except (CheckpointError, NonFiniteLossError, WeightsError) as error:
        raise DataError(f"train: {error}") from error
    return 0
