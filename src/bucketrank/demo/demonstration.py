"""The demo from start to end: data, runs, tables, figures and files."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from bucketrank.demo.compared_images import compare_images
from bucketrank.demo.comparison_figure import draw_comparison
from bucketrank.demo.paired_runs import LOSSES, DemoRun, DemoSettings, ShapeData, draw_or_read_shapes, recipe_for
from bucketrank.demo.terminal import ProgressTable, detection_table, side_by_side, summary_table
from bucketrank.drawing import grid
from bucketrank.durations import duration_in_words
from bucketrank.provenance.machine import describe

IMAGES_SHOWN = 4


def run_demo(settings: DemoSettings, out: Path, console: Console | None = None) -> list[DemoRun]:
    """Train, evaluate and compare both runs, write everything to the folder ``out`` and return the finished runs."""
    console = console or Console()
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with console.status(f"drawing {settings.train_images + settings.val_images} images"):
        data = draw_or_read_shapes(out / "shapes", settings)
    runs = [DemoRun(loss, recipe_for(loss, settings), settings, data) for loss in LOSSES]
    console.print(introduction(runs, settings), highlight=False)
    with console.status("compiling the loss"):
        for run in runs:
            run.warm_up()
    with ProgressTable(runs, settings, console) as progress:
        for first in range(0, settings.steps, settings.steps_per_turn):
            for run in runs:
                run.train(min(settings.steps_per_turn, settings.steps - first), partial(progress.step_done, run))
                progress.evaluation_done(run)

    with console.status("calibrating the scores"):
        for run in runs:
            run.calibrate()
    images = compare_images(runs, data, IMAGES_SHOWN)
    console.print(summary_table(runs))
    console.print(detection_table(images, runs))
    titles = ["ground truth", *(run.loss.label for run in runs)]
    if console.is_terminal and console.color_system in ("truecolor", "256"):
        console.print(side_by_side(images[0], titles, width=console.width))
    written = write_results(runs, settings, data, out)
    sheet = grid([drawn for image in images for drawn in image.drawn], titles, columns=len(titles))
    sheet.save(out / "detections.png")
    title = "One small detector, trained twice: only the loss differs"
    note = f"{task_description(settings)} Dashed boxes: ground truth. {caveat(settings)}"
    draw_comparison(runs, images, out / "demo.png", title=title, note=note)
    for path in (out / "demo.png", out / "detections.png", *written):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    console.print(f"{caveat(settings)} The demo took {duration_in_words(time.monotonic() - start)}.", highlight=False)
    return runs


def write_results(runs: Sequence[DemoRun], settings: DemoSettings, data: ShapeData, out: Path) -> list[Path]:
    """Write the weights of each run, and the numbers as ``demo.json``; return the paths."""
    paths = []
    for run in runs:
        paths.append(out / f"{run.loss.name}.safetensors")
        run.save(paths[-1])
    document = {
        "settings": settings.to_dict(),
        "classes": data.classes,
        "contenders": {run.loss.name: run.to_dict() for run in runs},
        "machine": describe(),
    }
    paths.append(out / "demo.json")
    paths[-1].write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return paths


def introduction(runs: Sequence[DemoRun], settings: DemoSettings) -> str:
    """Describe the comparison, to be printed before the first step."""
    labels = "; ".join(run.loss.label for run in runs)
    return (
        f"{task_description(settings)}\nTrained once with each loss: {labels}. Both runs have the same box loss "
        "(GIoU), seed, data, steps and learning rate.\n"
    )


def task_description(settings: DemoSettings) -> str:
    """Describe the detector, the data and the length of a run."""
    return (
        f"RetinaNet with {settings.backbone} from random weights, {settings.train_images} drawn images of "
        f"{settings.image_size} x {settings.image_size} pixels, {settings.steps} steps with batches of "
        f"{settings.batch_size}, evaluated on {settings.val_images} other images, seed {settings.seed}."
    )


def caveat(settings: DemoSettings) -> str:
    """State what limits the conclusions from these numbers."""
    return (
        f"One seed ({settings.seed}) and one small task; backbone, steps and learning rate were tuned with the ranking "
        "loss. The numbers are an indication, not a result."
    )
