"""What the demo shows in the terminal: both trainings side by side, then what they find."""

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

from bucketrank.demo.contest import Contender, Settings
from bucketrank.demo.detections import Seen
from bucketrank.drawing import as_rgb, colour_of
from bucketrank.training.progress import in_words

BAR = 10  # characters of a full bar
COLOURS = {"ranking": "blue", "focal": "dark_orange"}


class Board:
    """A table that grows with every evaluation, and a line about the step at hand; a context manager."""

    def __init__(self, contenders: Sequence[Contender], settings: Settings, console: Console) -> None:
        self.contenders, self.settings, self.console = contenders, settings, console
        self._began = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._shown = 0
        self._drawn = 0.0

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self.console.print(self.table())

    def told(self, contender: Contender, loss: float) -> None:
        """A step of a contender is done."""
        if self._live is None or time.monotonic() < self._drawn + 0.3:
            return
        self._drawn = time.monotonic()
        step = len(contender.durations)
        line = (
            f"{contender.loss.label}: step {step} of {self.settings.steps}   loss {loss:.3f}   "
            f"{contender.seconds:.2f} s/step   {in_words(self.left())} left"
        )
        self._live.update(Group(self.table(), Text(line, style=COLOURS[contender.loss.name])), refresh=True)

    def evaluated(self, contender: Contender) -> None:
        """A contender has a new point of its curve."""
        if self._live is not None:
            self._live.update(self.table(), refresh=True)
            return
        point = contender.curve[-1]
        self.console.print(
            f"step {point.step:4}  {contender.loss.label:<18}  loss {point.loss:.3f}  AP50 {point.metrics['AP50']:.2f} "
            f"{bar(point.metrics['AP50'])}  {contender.seconds:.2f} s/step  {in_words(self.left())} left",
            highlight=False,
            soft_wrap=True,
        )

    def left(self) -> float:
        """Seconds until both have done all steps, evaluations included."""
        done = sum(len(contender.durations) for contender in self.contenders)
        total = len(self.contenders) * self.settings.steps
        return (total - done) * (time.monotonic() - self._began) / max(done, 1)

    def table(self) -> Table:
        """Loss, AP50 and time of both after the same steps."""
        table = Table("step", title="AP50 on new pictures", title_justify="left")
        table.columns[0].justify = "right"
        for contender in self.contenders:
            style = COLOURS[contender.loss.name]
            table.add_column(contender.loss.label, style=style)
            table.add_column("loss", justify="right", style="dim")
            table.add_column("s/step", justify="right", style="dim")
        for row in range(max((len(contender.curve) for contender in self.contenders), default=0)):
            cells = []
            for contender in self.contenders:
                if row < len(contender.curve):
                    point = contender.curve[row]
                    ap = point.metrics["AP50"]
                    cells += [f"{ap:.2f} {bar(ap)}", f"{point.loss:.3f}", f"{point.seconds / point.step:.2f}"]
                else:
                    cells += ["", "", ""]
            step = next(c.curve[row].step for c in self.contenders if row < len(c.curve))
            table.add_row(str(step), *cells)
        return table


def summary(contenders: Sequence[Contender]) -> Table:
    """The last numbers of both; times as ratios to the last contender."""
    table = Table("", "AP", "AP50", "AP75", "s/step", "time", title="At the end", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    base = contenders[-1].seconds
    for contender in contenders:
        metrics = contender.curve[-1].metrics
        numbers = [f"{metrics[name]:.3f}" for name in ("AP", "AP50", "AP75")]
        ratio = f"{contender.seconds / base:.2f}\N{MULTIPLICATION SIGN}" if base else ""
        name = Text(contender.loss.label, style=COLOURS[contender.loss.name])
        table.add_row(name, *numbers, f"{contender.seconds:.3f}", ratio)
    return table


def found_table(seen: Sequence[Seen], contenders: Sequence[Contender]) -> Table:
    """How many objects of the pictures shown were found, and how many detections were wrong."""
    title = "Detections from each one's own threshold on"
    table = Table("picture", "objects", title=title, title_justify="left")
    for contender in contenders:
        table.add_column(contender.loss.label, style=COLOURS[contender.loss.name])
    for picture in seen:
        cells = [f"{right} found, {wrong} wrong" for right, wrong in picture.counts]
        table.add_row(str(picture.image_id), str(picture.objects), *cells)
    return table


def side_by_side(seen: Seen, titles: Sequence[str], *, width: int) -> Table:
    """The truth and what was found in coloured characters of two pixels each."""
    columns = max(16, min(48, width // len(titles) - 3)) // 2 * 2
    table = Table.grid(padding=(0, 2))
    table.add_row(*(Text(title, style="bold") for title in titles))
    table.add_row(*(characters(sketch(seen.image, shown, columns)) for shown in seen.shown))
    return table


def sketch(image: Tensor, detections: dict[str, Tensor], columns: int) -> Image.Image:
    """A small picture with frames a pixel wide in the colours of their classes."""
    picture = as_rgb(image)
    scale = columns / picture.width
    picture = picture.resize((columns, max(2, round(picture.height * scale / 2) * 2)), Image.Resampling.BOX)
    picture = Image.blend(picture, Image.new("RGB", picture.size, (128, 128, 128)), 0.35)
    pen = ImageDraw.Draw(picture)
    for box, label in zip(detections["boxes"].tolist(), detections["labels"].tolist(), strict=True):
        x1, y1, x2, y2 = (round(side * scale) for side in box)
        pen.rectangle((x1, y1, max(x1, x2 - 1), max(y1, y2 - 1)), outline=colour_of(label))
    return picture


def characters(picture: Image.Image) -> Text:
    """A picture as text: the upper half of a character in the colour of one pixel, the lower in that below."""
    pixels = np.asarray(picture)
    text = Text()
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        for one, other in zip(upper, lower, strict=True):
            colours = ("#" + "".join(f"{part:02x}" for part in colour) for colour in (one, other))
            text.append("\N{UPPER HALF BLOCK}", style=" on ".join(colours))
        text.append("\n")
    return text


def bar(share: float) -> str:
    """A share from 0 to 1 as a bar.

    >>> bar(0.5), bar(0.0), bar(float("nan"))
    ('█████     ', '          ', '          ')
    """
    eighths = round(8 * BAR * share) if share == share else 0
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + " ▏▎▍▌▋▊▉"[rest].strip()).ljust(BAR)
