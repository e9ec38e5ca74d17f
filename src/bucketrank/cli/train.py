"""Training commands: ``bucketrank recipes``, ``bucketrank train`` and ``bucketrank demo``."""

from __future__ import annotations

import os
import sys
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bucketrank.cli.arguments import Changes, say_next
from bucketrank.errors import DiskFullError, OutOfMemoryError, UsageError

if TYPE_CHECKING:
    from bucketrank.settings.recipe import Recipe

LESS_MEMORY = (
    "Start a new run with a smaller --batch (the learning rate scales with it), a smaller --imgsz, "
    "or --backbone.checkpointing true"
)


def recipes(
    recipe: Annotated[str | None, "show this recipe with all its settings"] = None,
    *,
    markdown: Annotated[bool, "print the list as a Markdown table"] = False,
    settings: Annotated[Changes, "settings of the recipe"],
) -> None:
    """List the recipes of the package with the paper's AP, or show one with all its settings."""
    from bucketrank.settings import paper

    if recipe is not None:
        sys.stdout.write(paper.show_recipe(recipe, settings))
    else:
        sys.stdout.write(paper.markdown() if markdown else paper.list_recipes())


def train(
    recipe: Annotated[str | None, "name or file of a recipe (see bucketrank recipes)"] = None,
    data: Annotated[Path | None, "folder of the data set"] = None,
    *,
    epochs: Annotated[int | None, "passes over the training set; the milestones scale along"] = None,
    batch: Annotated[int | None, "images per step, over all devices"] = None,
    imgsz: Annotated[int | None, "shorter side of the images in pixels; the limit of the longer scales along"] = None,
    lr: Annotated[float | None, "learning rate, for schedule.base_batch images per step"] = None,
    device: Annotated[str | None, "auto, cpu, cuda or mps; several GPUs: --trainer.devices 4"] = None,
    workers: Annotated[int | None, "data-loading workers per device"] = None,
    out: Annotated[
        Path | None, "folder for everything the run writes (default: runs/RECIPE, then runs/RECIPE-2, ...)"
    ] = None,
    resume: Annotated[bool, "continue the run in --out, or start it if --out holds no run"] = False,
    allow_changed_data: Annotated[bool, "resume although images or annotations changed (classes may never)"] = False,
    settings: Annotated[Changes, "settings of the recipe"],
) -> int:
    """Train a detector on a data set with a recipe; every setting is a flag, like --loss.delta 0.25."""
    from bucketrank.settings import load_recipe
    from bucketrank.settings.flags import ShortNames
    from bucketrank.training.processes import Interrupted, is_first_process, stop_signals

    if recipe is None and (out is None or not resume):
        raise UsageError("expected a recipe (see bucketrank recipes), or --resume and the --out of a run")
    if data is None and not resume:
        raise UsageError("expected the folder of the data set after the recipe, or as --data")
    out = out or _default_folder(str(recipe), resume=resume)
    short = ShortNames(epochs=epochs, batch=batch, imgsz=imgsz, lr=lr, device=device, workers=workers)
    stored = out / "recipe.yaml"
    if recipe is None and (settings or short.given()) and stored.is_file():  # change settings of the run's own recipe
        recipe = str(stored)
    try:
        with stop_signals():
            chosen = None if recipe is None else load_recipe(recipe, short.changes(recipe, settings))
            _train(chosen, data, out, resume=resume, allow_changed_data=allow_changed_data)
    except Interrupted:
        if not is_first_process():  # the first one reports; a status other than 0 would make Lightning kill it
            return 0
        sys.stderr.write(f"bucketrank: stopped; {_how_to_continue(out)}\n")
        return 130
    if is_first_process():
        say_next("report", out)
    return 0


def _default_folder(recipe: str, *, resume: bool) -> Path:
    """Return runs/RECIPE or, for a new run next to an earlier one, the first of runs/RECIPE-2, ... that is free."""
    from bucketrank.training.processes import FOLDER, is_first_process, is_launched

    first = Path("runs") / Path(recipe).stem
    if not is_first_process() and FOLDER in os.environ:
        return Path(os.environ[FOLDER])
    # The processes of a launcher cannot agree on a folder: one of them may have created it already.
    if resume or is_launched():
        return first
    folders = chain([first], (first.with_name(f"{first.name}-{number}") for number in count(2)))
    return next(folder for folder in folders if not folder.is_dir() or not any(folder.iterdir()))


def _how_to_continue(out: Path) -> str:
    if (out / "recipe.yaml").is_file():
        return f"resume with: bucketrank train --resume --out {out}"
    return "the run had not begun; start it with the same command"


def _train(recipe: Recipe | None, data: Path | None, out: Path, *, resume: bool, allow_changed_data: bool) -> None:
    """Train; print how to continue after a full disk or an out-of-memory error."""
    import torch

    from bucketrank.training.run import train as run

    try:
        run(recipe, data, out, resume=resume, allow_changed_data=allow_changed_data)
    except DiskFullError as error:
        raise DiskFullError(f"{error}; {_how_to_continue(out)}") from error
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"Out of device memory ({_first_line(error)}). {LESS_MEMORY}") from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise OutOfMemoryError(
            f"A data-loading worker died, usually from lack of memory ({_first_line(error)}). "
            f"Lower --workers; {_how_to_continue(out)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def demo(
    *,
    out: Annotated[Path, "folder for the images, the weights and the numbers"] = Path("runs/demo"),
    steps: Annotated[int, "training steps with each loss"] = 500,
    seed: Annotated[int, "seed of weights, order and flips"] = 0,
) -> None:
    """Train a small detector with a ranking loss and with focal loss, side by side (minutes on two cores)."""
    from bucketrank.demo.runs import DemoSettings
    from bucketrank.demo.show import run_demo

    try:
        settings = DemoSettings(steps=steps, seed=seed)
    except ValueError as error:
        raise UsageError(str(error)) from error
    run_demo(settings, out)
