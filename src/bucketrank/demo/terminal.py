"""The terminal output of the demo: both runs side by side, then their detections."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import Tensor

from bucketrank.demo.compared_images import ComparedImage
from bucketrank.demo.paired_runs import DemoRun, DemoSettings
from bucketrank.drawing import as_rgb, colour_of
from bucketrank.durations import duration_in_words

BAR_LENGTH = 10  # characters of a full bar
COLOURS = {"ranking": "blue", "focal": "dark_orange"}


class ProgressTable:
    """Context manager that shows a table with a row per evaluation and a line about the current step."""

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
            f"{run.seconds_per_step:.2f} s/step   {duration_in_words(self.seconds_left())} left"
        )
        self._live.update(Group(self.table(), Text(line, style=COLOURS[run.loss.name])), refresh=True)

    def evaluation_done(self, run: DemoRun) -> None:
        """Show the last evaluation of ``run``."""
        if self._live is not None:
            self._live.update(self.table(), refresh=True)
            return
        point = run.curve[-1]
        ap50, left = point.metrics["AP50"], duration_in_words(self.seconds_left())
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
        """Return a table with AP50, loss and time per step of both runs after the same steps."""
        table = Table("step", title="AP50 on validation images", title_justify="left")
        table.columns[0].justify = "right"
        for run in self.runs:
            style = COLOURS[run.loss.name]
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
    """Return a table with the final numbers of the runs; times are also given relative to the last run."""
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
        name = Text(run.loss.label, style=COLOURS[run.loss.name])
        table.add_row(name, *numbers, f"{run.seconds_per_step:.3f}", ratio)
    return table


def detection_table(images: Sequence[ComparedImage], runs: Sequence[DemoRun]) -> Table:
    """Return a table with the numbers of correct and wrong detections per image."""
    title = "Detections at or above the threshold of each run"
    table = Table("image", "objects", title=title, title_justify="left")
    for run in runs:
        table.add_column(run.loss.label, style=COLOURS[run.loss.name])
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
    """Return a small copy of the image with boxes one pixel wide in the colours of their classes."""
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
    """Return the image as text: a character shows one pixel in its upper half and the pixel below in its lower half."""
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
