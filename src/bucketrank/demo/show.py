"""Run the demo: train both runs with live output in the terminal, then show tables, a figure and detections."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import Tensor

from bucketrank.console import format_duration
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
from bucketrank.drawing import as_rgb, colour_of, grid
from bucketrank.figures import BLUE, GRID, INK, ORANGE, STYLE
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
    images = compare_images(runs, data, NUM_IMAGES)
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
    console.print(f"{caveat(settings)} The demo took {format_duration(time.monotonic() - start)}.", highlight=False)
    return runs


def write_results(runs: Sequence[DemoRun], settings: DemoSettings, data: ShapeData, out: Path) -> list[Path]:
    """Write the weights of each run and ``demo.json`` with the numbers; return the paths."""
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
    """Describe the comparison before the first step."""
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
    """State the limits of these numbers."""
    return (
        f"One seed ({settings.seed}) and one small task; backbone, steps and learning rate were tuned with the ranking "
        "loss. The numbers are an indication, not a result."
    )


class ProgressTable:
    """A live table with one row per evaluation and a line about the current step; a context manager."""

    def __init__(self, runs: Sequence[DemoRun], settings: DemoSettings, console: Console) -> None:
        self.runs, self.settings, self.console = runs, settings, console
        self._started_at = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._refreshed_at = 0.0

    def __enter__(self) -> ProgressTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self.console.print(self.table())

    def step_done(self, run: DemoRun, loss: float) -> None:
        """Show the progress after a step of ``run``."""
        if self._live is None or time.monotonic() < self._refreshed_at + 0.3:
            return
        self._refreshed_at = time.monotonic()
        step = len(run.durations)
        line = (
            f"{run.loss.label}: step {step} of {self.settings.steps}   loss {loss:.3f}   "
            f"{run.seconds_per_step:.2f} s/step   {format_duration(self.seconds_left())} left"
        )
        self._live.update(Group(self.table(), Text(line, style=TERMINAL_COLOURS[run.loss.name])), refresh=True)

    def evaluation_done(self, run: DemoRun) -> None:
        """Show the last evaluation of ``run``."""
        if self._live is not None:
            self._live.update(self.table(), refresh=True)
            return
        point = run.curve[-1]
        ap50, left = point.metrics["AP50"], format_duration(self.seconds_left())
        self.console.print(
            f"step {point.step:4}  {run.loss.label:<18}  loss {point.loss:.3f}  AP50 {ap50:.2f} {bar(ap50)}  "
            f"{run.seconds_per_step:.2f} s/step  {left} left",
            highlight=False,
            soft_wrap=True,
        )

    def seconds_left(self) -> float:
        """Estimate the seconds until both runs are finished, evaluations included."""
        done = sum(len(run.durations) for run in self.runs)
        total = len(self.runs) * self.settings.steps
        return (total - done) * (time.monotonic() - self._started_at) / max(done, 1)

    def table(self) -> Table:
        """Show AP50, loss and time per step of both runs after the same steps."""
        table = Table("step", title="AP50 on validation images", title_justify="left")
        table.columns[0].justify = "right"
        for run in self.runs:
            style = TERMINAL_COLOURS[run.loss.name]
            table.add_column(run.loss.label, style=style)
            table.add_column("loss", justify="right", style="dim")
            table.add_column("s/step", justify="right", style="dim")
        for row in range(max((len(run.curve) for run in self.runs), default=0)):
            cells = []
            for run in self.runs:
                if row < len(run.curve):
                    point = run.curve[row]
                    ap = point.metrics["AP50"]
                    cells += [f"{ap:.2f} {bar(ap)}", f"{point.loss:.3f}", f"{point.seconds / point.step:.2f}"]
                else:
                    cells += ["", "", ""]
            step = next(run.curve[row].step for run in self.runs if row < len(run.curve))
            table.add_row(str(step), *cells)
        return table


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


def side_by_side(image: ComparedImage, titles: Sequence[str], *, width: int) -> Table:
    """Draw the ground truth and the detections of each run in coloured characters of two pixels each."""
    columns = max(16, min(48, width // len(titles) - 3)) // 2 * 2
    table = Table.grid(padding=(0, 2))
    table.add_row(*(Text(title, style="bold") for title in titles))
    table.add_row(*(characters(sketch(image.image, boxes, columns)) for boxes in image.boxes))
    return table


def sketch(image: Tensor, detections: dict[str, Tensor], columns: int) -> Image.Image:
    """Make a small copy of the image with boxes one pixel wide in their class colours."""
    small = as_rgb(image)
    scale = columns / small.width
    small = small.resize((columns, max(2, round(small.height * scale / 2) * 2)), Image.Resampling.BOX)
    small = Image.blend(small, Image.new("RGB", small.size, (128, 128, 128)), 0.35)
    pen = ImageDraw.Draw(small)
    for box, label in zip(detections["boxes"].tolist(), detections["labels"].tolist(), strict=True):
        x1, y1, x2, y2 = (round(side * scale) for side in box)
        pen.rectangle((x1, y1, max(x1, x2 - 1), max(y1, y2 - 1)), outline=colour_of(label))
    return small


def characters(image: Image.Image) -> Text:
    """Convert an image to text: each character shows one pixel in its upper half and the pixel below it."""
    pixels = np.asarray(image)
    text = Text()
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        for one, other in zip(upper, lower, strict=True):
            colours = ("#" + "".join(f"{part:02x}" for part in colour) for colour in (one, other))
            text.append("\N{UPPER HALF BLOCK}", style=" on ".join(colours))
        text.append("\n")
    return text


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
