"""``bucketrank train``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bucketrank.arguments import SettingFlags, UsageError, require
from bucketrank.data.problems import DataError

if TYPE_CHECKING:
    from bucketrank.recipes import Recipe

LESS_MEMORY = (
    "Start a new run with a smaller --data.batch_size (the learning rate scales with it), a smaller --inputs.max_size, "
    "or --backbone.checkpointing true"
)


def train(
    recipe: Annotated[str | None, "name or file of a recipe (see bucketrank recipes)"] = None,
    *,
    data: Annotated[Path | None, "folder of the data set"] = None,
    out: Annotated[Path | None, "folder for everything the run writes (default: runs/RECIPE)"] = None,
    resume: Annotated[bool, "continue the run in --out, or start it if --out holds no run"] = False,
    allow_changed_data: Annotated[bool, "resume although images or annotations changed (classes may never)"] = False,
    settings: Annotated[SettingFlags, "settings of the recipe"],
) -> int:
    """Train a detector by a recipe on a data set; every setting is a flag, like --loss.delta 0.25."""
    require("rich", "PIL", "faster_coco_eval", "filelock", "yaml", "lightning", "timm", "matplotlib", extra="detect")
    from bucketrank.recipes import RecipeError, load_recipe
    from bucketrank.training.launch import is_first_process
    from bucketrank.training.stop_signals import Interrupted, stop_signals

    if recipe is None and (out is None or not resume):
        raise UsageError("train: expected a recipe (see bucketrank recipes), or --resume and the --out of a run")
    if data is None and not resume:
        raise UsageError("train: expected --data, the folder of the data set")
    out = out or Path("runs") / Path(str(recipe)).stem
    if recipe is None and settings and (out / "recipe.yaml").is_file():  # change settings of the run's own recipe
        recipe = str(out / "recipe.yaml")
    try:
        with stop_signals():
            chosen = None if recipe is None else load_recipe(recipe, settings)
            return _train(chosen, data, out, resume=resume, allow_changed_data=allow_changed_data)
    except RecipeError as error:
        raise UsageError(f"train: {error}") from error
    except Interrupted:
        if not is_first_process():  # the first one reports; a status other than 0 would make Lightning kill it
            return 0
        sys.stderr.write(f"bucketrank: stopped; {_how_to_continue(out)}\n")
        return 130


def _how_to_continue(out: Path) -> str:
    if (out / "recipe.yaml").is_file():
        return f"resume with: bucketrank train --resume --out {out}"
    return "the run had not begun; start it with the same command"


def _train(recipe: Recipe | None, data: Path | None, out: Path, *, resume: bool, allow_changed_data: bool) -> int:
    """Train, turn what can go wrong into messages, and return the exit status."""
    import torch

    from bucketrank.training.detector_module import NonFiniteLossError
    from bucketrank.training.run import train as run
    from bucketrank.weights.atomic import DiskFullError

    try:
        run(recipe, data, out, resume=resume, allow_changed_data=allow_changed_data)
    except DiskFullError as error:
        raise DataError(f"train: {error}; {_how_to_continue(out)}") from error
    except NonFiniteLossError as error:
        raise DataError(f"train: {error}") from error
    except torch.OutOfMemoryError as error:
        raise DataError(f"train: Out of device memory ({_first_line(error)}). {LESS_MEMORY}") from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            f"train: A data-loading worker died, usually from lack of memory ({_first_line(error)}). "
            f"Lower --data.workers; {_how_to_continue(out)}"
        ) from error
    return 0


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
