"""Training commands: ``bucketrank recipes``, ``bucketrank train`` and ``bucketrank demo``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from bucketrank.cli.arguments import Changes, say_next
from bucketrank.errors import UsageError


def recipes(
    recipe: Annotated[str | None, "show this recipe with all its settings"] = None,
    *,
    settings: Annotated[Changes, "settings of the recipe"],
) -> None:
    """List the recipes of the package with the paper's AP, or show one with all its settings."""
    from bucketrank.settings import paper

    sys.stdout.write(paper.list_recipes() if recipe is None else paper.show_recipe(recipe, settings))


def train(
    recipe: Annotated[str | None, "name or file of a recipe (see bucketrank recipes), or a run to --resume"] = None,
    data: Annotated[Path | None, "folder of the data set (COCO, YOLO, Pascal VOC, Roboflow), or its data.yaml"] = None,
    *,
    epochs: Annotated[int | None, "passes over the training set; the milestones scale along"] = None,
    batch: Annotated[int | None, "images per step, over all devices; -1 for as many as fit on the GPU"] = None,
    imgsz: Annotated[int | None, "shorter side of the images in pixels; the limit of the longer scales along"] = None,
    lr: Annotated[float | None, "learning rate, for schedule.base_batch images per step"] = None,
    device: Annotated[str | None, "auto, cpu, cuda or mps; several GPUs: --trainer.devices 4"] = None,
    workers: Annotated[int | None, "data-loading workers per device"] = None,
    time: Annotated[str | None, "train for this time, like 2h, 90m or 45s, instead of epochs"] = None,
    out: Annotated[
        Path | None, "folder for everything the run writes (default: runs/RECIPE, then runs/RECIPE-2, ...)"
    ] = None,
    resume: Annotated[bool, "continue a run: train RUN --resume; with a recipe, continue --out or start it"] = False,
    allow_changed_data: Annotated[bool, "resume although images or annotations changed (classes may never)"] = False,
    settings: Annotated[Changes, "settings of the recipe"],
) -> int:
    """Train a detector on a data set with a recipe; every setting is a flag, like --loss.delta 0.25."""
    from bucketrank.settings.flags import ShortNames
    from bucketrank.training.processes import Interrupted, is_first_process
    from bucketrank.training.start import how_to_continue, recipe_and_folder, start_run

    chosen, folder = recipe_and_folder(recipe, data, out, resume=resume)
    short = ShortNames(epochs=epochs, batch=batch, imgsz=imgsz, lr=lr, device=device, workers=workers, time=time)
    options: dict[str, Any] = {"resume": resume, "allow_changed_data": allow_changed_data}
    try:
        start_run(chosen, data, folder, short=short, settings=settings, **options)
    except Interrupted:
        if not is_first_process():  # the first one reports; a status other than 0 would make Lightning kill it
            return 0
        sys.stderr.write(f"bucketrank: stopped; {how_to_continue(folder)}\n")
        return 130
    if is_first_process():
        say_next("report", folder)
    return 0


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
