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
    resume: Annotated[bool, "continue the run in --out, or start it if there is none"] = False,
    settings: Annotated[SettingFlags, "settings of the recipe"],
) -> int:
    """Train a detector by a recipe on a data set; every setting is a flag, like --loss.delta 0.25."""
    require("rich", "PIL", "faster_coco_eval", "yaml", "lightning", "timm", "matplotlib", extra="detect")
    from bucketrank.recipes import RecipeError, load_recipe

    if recipe is None and (out is None or not resume):
        raise UsageError("train: expected a recipe (see bucketrank recipes), or --resume and the --out of a run")
    if data is None and not resume:
        raise UsageError("train: expected --data, the folder of the data set")
    out = out or Path("runs") / Path(str(recipe)).stem
    if recipe is None and settings and (out / "recipe.yaml").is_file():  # change settings of the run's own recipe
        recipe = str(out / "recipe.yaml")
    try:
        chosen = None if recipe is None else load_recipe(recipe, settings)
        return _train(chosen, data, out, resume=resume)
    except RecipeError as error:
        raise UsageError(f"train: {error}") from error


def _train(recipe: Recipe | None, data: Path | None, out: Path, *, resume: bool) -> int:
    """Train, turn what can go wrong into messages, and return the exit status."""
    import torch

    from bucketrank.training.detector_module import NonFiniteLossError
    from bucketrank.training.run import train as run
    from bucketrank.training.run_keeper import Interrupted

    how_to_resume = f"resume with: bucketrank train --resume --out {out}"
    try:
        run(recipe, data, out, resume=resume)
    except Interrupted:
        sys.stderr.write(f"bucketrank: stopped; {how_to_resume}\n")
        return 130
    except NonFiniteLossError as error:
        raise DataError(f"train: {error}") from error
    except torch.OutOfMemoryError as error:
        raise DataError(f"train: Out of device memory ({_first_line(error)}). {LESS_MEMORY}") from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            f"train: A data-loading worker died, usually from lack of memory ({_first_line(error)}). "
            f"Lower --data.workers; {how_to_resume}"
        ) from error
    return 0


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
