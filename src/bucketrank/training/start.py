"""Start a run by the name of a recipe, with short names and a folder of its own: what the command and Python share.

Imports nothing heavy: a command installs the signal handlers before it imports torch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketrank.errors import DiskFullError, OutOfMemoryError, UsageError, first_line
from bucketrank.settings.flags import ShortNames
from bucketrank.settings.recipe import load_recipe, recipe_names
from bucketrank.training.processes import FOLDER, is_first_process, is_launched, stop_signals

if TYPE_CHECKING:
    from rich.console import Console

    from bucketrank.training.run import RunResult

LESS_MEMORY = (
    "Start a new run with a smaller --batch (the learning rate scales with it), a smaller --imgsz, "
    "or --backbone.checkpointing true"
)


def start_run(
    recipe: str | Path | None,
    data: Path | str | None,
    out: Path,
    *,
    short: ShortNames,
    settings: Mapping[str, Any],
    resume: bool,
    allow_changed_data: bool,
    console: Console | None = None,
) -> RunResult:
    """Load the recipe with its changes and train; say how to continue after a full disk or an out-of-memory error.

    ``recipe`` and ``out`` are those of :func:`recipe_and_folder`. Raises Interrupted after Ctrl-C or SIGTERM.
    """
    stored = out / "recipe.yaml"
    if recipe is None and (settings or short.given()) and stored.is_file():  # change settings of the run's own recipe
        recipe = stored
    with stop_signals():
        chosen = None if recipe is None else load_recipe(recipe, short.changes(recipe, settings))
        import torch

        from bucketrank.training import run

        try:
            return run.train(chosen, data, out, resume=resume, allow_changed_data=allow_changed_data, console=console)
        except DiskFullError as error:
            raise DiskFullError(f"{error}; {how_to_continue(out)}") from error
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"Out of device memory ({first_line(error)}). {LESS_MEMORY}") from error
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise OutOfMemoryError(
                f"A data-loading worker died, usually from lack of memory ({first_line(error)}). "
                f"Lower --workers; {how_to_continue(out)}"
            ) from error


def recipe_and_folder(
    recipe: str | Path | None, data: Path | str | None, out: Path | str | None, *, resume: bool
) -> tuple[str | Path | None, Path]:
    """Return the recipe and the folder of a run; raise UsageError unless the arguments say enough to start it.

    A run folder in place of the recipe is the run to resume, with its own recipe. Otherwise the folder is by default
    runs/RECIPE or, for a new run next to an earlier one, the first of runs/RECIPE-2, ... that is free.
    """
    if recipe is not None and (Path(recipe) / "recipe.yaml").is_file():
        if not resume:
            raise UsageError(f"{recipe}: expected a recipe, got a run; continue it with --resume")
        if out is not None:
            raise UsageError(f"{recipe}: expected the run to resume, got --out {out} too; remove one")
        recipe, out = None, recipe
    if recipe is None and (out is None or not resume):
        raise UsageError("expected a recipe (see bucketrank recipes), or a run folder with --resume")
    if recipe is not None and _is_data(recipe):
        raise UsageError(
            f"{recipe}: expected a recipe, got a data set; put a recipe first: bucketrank train atss-laptop {recipe}"
        )
    if resume and data is None and out is None and "/" in str(recipe) and Path(str(recipe)).suffix == "":
        raise UsageError(f"{recipe}: expected a run folder to resume, got none with a recipe.yaml; correct the path")
    if data is None and not resume:
        raise UsageError("expected a data set after the recipe (data): its folder or data.yaml")
    if out is not None:
        return recipe, Path(out)
    first = Path("runs") / Path(str(recipe)).stem
    if not is_first_process() and FOLDER in os.environ:
        return recipe, Path(os.environ[FOLDER])
    # The processes of a launcher cannot agree on a folder: one of them may have created it already.
    if resume or is_launched():
        return recipe, first
    folders = chain([first], (first.with_name(f"{first.name}-{number}") for number in count(2)))
    return recipe, next(folder for folder in folders if not folder.is_dir() or not any(folder.iterdir()))


def _is_data(recipe: str | Path) -> bool:
    """Return whether the name of a recipe is a folder or a data.yaml: the recipe itself was forgotten."""
    path = Path(recipe)
    return str(recipe) not in recipe_names() and (path.is_dir() or path.name in ("data.yaml", "data.yml"))


def how_to_continue(out: Path) -> str:
    """Say how to continue a stopped run."""
    if (out / "recipe.yaml").is_file():
        return f"resume with: bucketrank train {shlex.quote(str(out))} --resume"
    return "the run had not begun; start it with the same command"
