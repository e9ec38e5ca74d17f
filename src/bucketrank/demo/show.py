"""Run the demo: train both runs, then show tables, a figure and detections."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bucketrank.demo.runs import (
    LOSSES,
    ComparedImage,
    DemoRun,
    DemoSettings,
    ShapeData,
    compare_images,
    draw_or_read_shapes,
    recipe_for,
)
from bucketrank.drawing import grid
from bucketrank.output import BLUE, GRID, INK, ORANGE, STYLE, format_duration, progress_bar, say
from bucketrank.provenance import describe, format_machine

NUM_IMAGES = 4  # images in the figure and the tables
BAR_LENGTH = 10  # characters of a full bar
TERMINAL_COLOURS = {"ranking": "blue", "focal": "dark_orange"}
FIGURE_COLOURS = {"ranking": BLUE, "focal": ORANGE}
MARKERS = {"ranking": "o", "focal": "v"}


def run_demo(settings: DemoSettings, out: Path, console: Console | None = None) -> list[DemoRun]:
    """Train, evaluate and compare both runs, write everything to the folder ``out`` and return the finished runs."""
    console = console or Console()
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with console.status(f"drawing {settings.train_images + settings.val_images} images"):
        data = draw_or_read_shapes(out / "shapes", settings)
    runs = [DemoRun(loss, recipe_for(loss, settings), settings, data) for loss in LOSSES]
    labels = "; ".join(run.loss.label for run in runs)
    console.print(
        f"{task_description(settings)}\nTrained once with each loss: {labels}. Both runs have the same box loss "
        "(GIoU), seed, data, steps and learning rate.\n",
        highlight=False,
    )
    with console.status("compiling the loss"):
        for run in runs:
            run.warm_up()
    with progress_bar(console) as progress:
        task = progress.add_task("training", total=len(runs) * settings.steps)
        for first in range(0, settings.steps, settings.steps_per_turn):
            for run in runs:
                run.train(min(settings.steps_per_turn, settings.steps - first), partial(progress.advance, task))
                print_evaluation(run, console)

    with console.status("calibrating the scores"):
        for run in runs:
            run.calibrate()
    images = compare_images(runs, data, NUM_IMAGES)
    console.print(summary_table(runs))
    console.print(detection_table(images, runs))
    written = write_results(runs, settings, data, out)
    titles = ["ground truth", *(run.loss.label for run in runs)]
    sheet = grid([drawn for image in images for drawn in image.drawn], titles, columns=len(titles))
    sheet.save(out / "detections.png")
    title = "One small detector, trained twice: only the loss differs"
    note = f"{task_description(settings)} Dashed boxes: ground truth. {caveat(settings)}"
    draw_comparison(runs, images, out / "demo.png", title=title, note=note)
    for path in (out / "demo.png", out / "detections.png", *written):
        say(console, f"wrote {path}")
    console.print(f"{caveat(settings)} The demo took {format_duration(time.monotonic() - start)}.", highlight=False)
    return runs


def write_results(runs: Sequence[DemoRun], settings: DemoSettings, data: ShapeData, out: Path) -> list[Path]:
    """Write the weights of each run and ``demo.json`` with the numbers; return the paths."""
    paths = []
    for run in runs:
        paths.append(out / f"{run.loss.name}.safetensors")
        run.save(paths[-1])
    document = {
        "settings": asdict(settings),
        "classes": data.classes,
        "contenders": {run.loss.name: run.to_dict() for run in runs},
        "machine": describe(),
    }
    paths.append(out / "demo.json")
    paths[-1].write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return paths


def task_description(settings: DemoSettings) -> str:
    """Describe the detector, the data and the length of a run."""
    return (
        f"RetinaNet with {settings.backbone} from random weights, {settings.train_images} drawn images of "
        f"{settings.image_size} x {settings.image_size} pixels, {settings.steps} steps with batches of "
        f"{settings.batch_size}, evaluated on {settings.val_images} other images, seed {settings.seed}."
    )


def caveat(settings: DemoSettings) -> str:
    """State the limits of these numbers."""
    return (
        f"One seed ({settings.seed}) and one small task; backbone, steps and learning rate were tuned with the ranking "
        "loss. The numbers are an indication, not a result."
    )


def print_evaluation(run: DemoRun, console: Console) -> None:
    """Print the last evaluation of ``run`` as one line in its colour."""
    point = run.curve[-1]
    ap50 = point.metrics["AP50"]
    line = (
        f"step {point.step:4}  {run.loss.label:<18}  loss {point.loss:.3f}  AP50 {ap50:.2f} {bar(ap50)}  "
        f"{run.seconds_per_step:.2f} s/step"
    )
    console.print(Text(line, style=TERMINAL_COLOURS[run.loss.name]), soft_wrap=True)


def summary_table(runs: Sequence[DemoRun]) -> Table:
    """Show the final numbers of the runs, with times also relative to the last run."""
    table = Table(
        "", "AP", "AP50", "AP75", "s/step", "relative time", title="After the last step", title_justify="left"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    base = runs[-1].seconds_per_step
    for run in runs:
        metrics = run.curve[-1].metrics
        numbers = [f"{metrics[name]:.3f}" for name in ("AP", "AP50", "AP75")]
        ratio = f"{run.seconds_per_step / base:.2f}\N{MULTIPLICATION SIGN}" if base else ""
        name = Text(run.loss.label, style=TERMINAL_COLOURS[run.loss.name])
        table.add_row(name, *numbers, f"{run.seconds_per_step:.3f}", ratio)
    return table


def detection_table(images: Sequence[ComparedImage], runs: Sequence[DemoRun]) -> Table:
    """Show the number of correct and wrong detections per image."""
    title = "Detections at or above the threshold of each run"
    table = Table("image", "objects", title=title, title_justify="left")
    for run in runs:
        table.add_column(run.loss.label, style=TERMINAL_COLOURS[run.loss.name])
    for image in images:
        cells = [f"{correct} correct, {wrong} wrong" for correct, wrong in image.counts]
        table.add_row(str(image.image_id), str(image.objects), *cells)
    return table


def bar(fraction: float) -> str:
    """Draw a fraction from 0 to 1 as a bar; NaN is drawn as 0.

    >>> bar(0.5), bar(0.0), bar(float("nan"))
    ('█████     ', '          ', '          ')
    """
    eighths = round(8 * BAR_LENGTH * fraction) if fraction == fraction else 0
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + " ▏▎▍▌▋▊▉"[rest].strip()).ljust(BAR_LENGTH)


def draw_comparison(
    runs: Sequence[DemoRun], images: Sequence[ComparedImage], path: Path, *, title: str, note: str
) -> None:
    """Draw AP over steps and over time, the time per step, and detections side by side to the file ``path``."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 4.3 + 3.1 * 3), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=[3.6, 9.4])
        top, bottom = parts
        top.suptitle(title, fontsize=14, fontweight="bold", color=INK, x=0.012, ha="left")
        over_steps, over_time, times = top.subplots(1, 3, width_ratios=[1.2, 1.2, 0.8])
        _curves(over_steps, runs, over_time=False)
        _curves(over_time, runs, over_time=True)
        over_time.sharey(over_steps)
        _times(times, runs)
        names = ["ground truth", *(run.loss.label for run in runs)]
        axes = bottom.subplots(len(names), len(images), squeeze=False)
        for column, image in enumerate(images):
            for row, name in enumerate(names):
                _image(axes[row][column], image, row, name if column == 0 else "")
        footer = "\n".join([*textwrap.wrap(note, 200), *textwrap.wrap(format_machine(describe()), 200)])
        figure.text(0.012, -0.002, footer, fontsize=7, color="#777777", va="top")
        figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.15)


def _curves(axes: Axes, runs: Sequence[DemoRun], *, over_time: bool) -> None:
    for run in runs:
        points = run.curve
        x = [point.seconds / 60 if over_time else point.step for point in points]
        colour, marker = FIGURE_COLOURS[run.loss.name], MARKERS[run.loss.name]
        y = [point.metrics["AP50"] for point in points]
        axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=2.2, label=run.loss.label)
        y = [point.metrics["AP"] for point in points]
        axes.plot(x, y, color=colour, linewidth=1.2, linestyle=(0, (2, 2)))
    axes.set(xlabel="minutes of training" if over_time else "steps", ylim=(0, 1), xlim=(0, None))
    if not over_time:
        axes.set_ylabel("AP50 (bold) and AP (dotted) on validation images")
        axes.legend(frameon=False, loc="upper left")
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def _times(axes: Axes, runs: Sequence[DemoRun]) -> None:
    for x, run in enumerate(runs):
        low, middle, high = np.percentile(run.durations, [25, 50, 75])
        axes.bar(x, middle, width=0.55, color=FIGURE_COLOURS[run.loss.name])
        axes.errorbar(x, middle, [[middle - low], [high - middle]], color=INK, linewidth=1, capsize=3)
        axes.text(x, high, f"{middle:.2f} s\n", ha="center", va="bottom", linespacing=0.4)
    axes.set_xticks(range(len(runs)), [run.loss.label for run in runs])
    axes.set(ylabel="seconds per step, median and quartiles", ylim=(0, 1.25 * axes.get_ylim()[1]))
    axes.tick_params(length=0)


def _image(axes: Axes, image: ComparedImage, row: int, name: str) -> None:
    axes.imshow(np.asarray(image.drawn[row]))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    if name:
        axes.set_ylabel(name, fontsize=11)
    if row == 0:
        text = f"{image.objects} objects"
    else:
        correct, wrong = image.counts[row - 1]
        text = f"{correct} correct, {wrong} wrong"
    axes.set_title(text, fontsize=9, color=INK, pad=4)
