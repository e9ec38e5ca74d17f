"""Further logs of a run by the loggers of Lightning: TensorBoard, Weights & Biases, MLflow, CSV."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bucketrank.errors import MAX_QUOTED, RecipeError, printable


def require_loggers(names: Sequence[str]) -> None:
    """Raise RecipeError that names the missing package unless all these loggers can be used."""
    for name in names:
        if name != "csv" and find_spec(name) is None:
            raise RecipeError(f"trainer.loggers: {name} needs the package {name}; install with: pip install {name}")


def build_loggers(names: Sequence[str], folder: Path) -> list[Any]:
    """Return the loggers of Lightning by name; each writes to a folder of its own inside the run folder."""
    return [_LOGGERS[name](folder) for name in names]


def log_row(loggers: list[Any], row: Mapping[str, float], step: int) -> None:
    """Give the numbers of a step to each logger; one that fails is reported and removed, and the run goes on.

    The tables of the run hold the same numbers, so that a server that does not answer costs no training.
    """
    for logger in list(loggers):
        try:
            logger.log_metrics(dict(row), step=step)
        except Exception as error:  # noqa: BLE001, PERF203 (the errors of four libraries share no narrower class)
            loggers.remove(logger)
            reason = printable(f"{type(error).__name__}: {error}".partition("\n")[0])[:MAX_QUOTED]
            sys.stderr.write(
                f"bucketrank: trainer.loggers: {type(logger).__name__} failed at step {step} ({reason}); the run "
                "goes on without it, train.csv and validation.csv have all numbers\n"
            )


def _tensorboard(folder: Path) -> Any:
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(folder, name=None, version="tensorboard")


def _wandb(folder: Path) -> Any:
    from lightning.pytorch.loggers import WandbLogger

    # The same run folder is the same run there, so that a resumed run continues its curves.
    number = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    project = os.environ.get("WANDB_PROJECT", "bucketrank")
    return WandbLogger(name=folder.name, save_dir=folder, project=project, id=number, resume="allow")


def _mlflow(folder: Path) -> Any:
    from lightning.pytorch.loggers import MLFlowLogger

    uri = os.environ.get("MLFLOW_TRACKING_URI", (folder / "mlruns").absolute().as_uri())
    return MLFlowLogger(experiment_name="bucketrank", run_name=folder.name, tracking_uri=uri)


def _csv(folder: Path) -> Any:
    from lightning.pytorch.loggers import CSVLogger

    return CSVLogger(folder, name="csv")


_LOGGERS: dict[str, Callable[[Path], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "csv": _csv,
}
