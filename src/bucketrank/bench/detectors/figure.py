"""Seconds per iteration as bars, the loss's part of them darker: a panel for each detector."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bucketrank.bench.detectors.contenders import BUCKETED, EXACT, FOCAL, NAMES, PAIRWISE, TITLES, USUAL
from bucketrank.bench.detectors.report import size_of
from bucketrank.bench.detectors.study import Result, Study
from bucketrank.bench.machine import in_words
from bucketrank.bench.numbers import seconds_in_words
from bucketrank.bench.style import INK, STYLE, save
from bucketrank.bench.tables import TIMES

# Okabe and Ito's colours, as in the figure of the losses.
COLOURS = {EXACT: "#0072B2", BUCKETED: "#E69F00", PAIRWISE: "#D55E00", FOCAL: "#444444", USUAL: "#888888"}
# A bar longer than so many times the longest score-based one is cut off.
LONGEST = 3.0
COLUMNS = 3


class Lengths(NamedTuple):
    """Of a bar, in seconds: the whole with its quartiles, and the loss's part; estimated ones have no parts."""

    whole: float
    low: float
    high: float
    loss: float
    estimated: bool


def draw_study(study: Study, out: Path) -> list[Path]:
    """``detectors.png`` and ``detectors.svg``."""
    with mpl.rc_context(STYLE):
        return save(_figure(study), out, "detectors")


def _figure(study: Study) -> Figure:
    detectors = study.settings.detectors
    columns = min(COLUMNS, len(detectors))
    rows = math.ceil(len(detectors) / columns)
    width, height = max(3.9 * columns + 0.4, 8.2), 2.2 * rows + 1.8
    figure = Figure(figsize=(width, height))
    grid = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(
        left=1.5 / width, right=1 - 0.3 / width, top=1 - 1.15 / height, bottom=0.95 / height, hspace=0.42, wspace=0.52
    )
    panels = [axes for row in grid for axes in row]
    for axes, detector in zip(panels, detectors, strict=False):
        _panel(axes, [study.find(detector, name) for name in NAMES])
        axes.set_title(TITLES[detector], color=INK, fontsize=10.5, fontweight="bold", loc="left", pad=6)
    for axes in panels[len(detectors) :]:
        axes.set_axis_off()
    left = 0.25 / width
    title = "Seconds per iteration: forward, backward, optimiser"
    figure.text(left, 1 - 0.4 / height, title, fontsize=13, fontweight="bold")
    told = f"Dark: the loss, forward and backward. Whiskers: quartiles. {TIMES}: ratio to focal on the same candidates."
    if any(result.skipped for result in study.results):
        told += " Dashed: estimated, not run."
    figure.text(left, 1 - 0.65 / height, told, fontsize=9, color="#666666")
    foot = [size_of(study.settings), in_words(study.machine)]
    # About 19 letters of this size an inch.
    lines = [line for text in foot for line in textwrap.wrap(text, int(19 * width))]
    figure.text(left, 0.12 / height, "\n".join(lines), fontsize=7, color="#777777", linespacing=1.4)
    return figure


def _lengths(result: Result) -> Lengths | None:
    if result.seconds is not None:
        whole = result.seconds
        # In the steps in which the loss was timed it may have been slower than in these.
        loss = whole.median * result.share.median if result.share is not None else 0.0
        return Lengths(whole.median, whole.low, whole.high, loss, estimated=False)
    if result.estimated_seconds is not None:
        whole_seconds = result.estimated_seconds
        return Lengths(whole_seconds, whole_seconds, whole_seconds, 0.0, estimated=True)
    return None


def _panel(axes: Axes, results: list[Result]) -> None:
    found = {result.contender: _lengths(result) for result in results}
    scored = [lengths.high for name in (FOCAL, USUAL) if (lengths := found[name]) is not None]
    longest = min(LONGEST * max(scored), max(lengths.high for lengths in found.values() if lengths is not None))
    for place, result in enumerate(results):
        lengths = found[result.contender]
        if lengths is None:
            continue
        colour, cut = COLOURS[result.contender], min(lengths.whole, longest)
        if lengths.estimated:
            axes.barh(place, cut, 0.62, color="white", edgecolor=colour, linestyle="--", linewidth=1.0)
        else:
            axes.barh(place, cut, 0.62, color=_tint(colour), linewidth=0)
            axes.barh(place, min(lengths.loss, longest), 0.62, color=colour, linewidth=0)
            if lengths.high <= longest:
                axes.plot([lengths.low, lengths.high], [place, place], color=INK, linewidth=1.1)
        axes.text(
            max(cut, min(lengths.high, longest)) + 0.02 * longest,
            place,
            _label(result, lengths, cut=cut < lengths.whole),
            va="center",
            fontsize=8,
            fontweight="bold" if result.contender == EXACT else "normal",
        )
    axes.set_yticks(range(len(results)), [result.title for result in results], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.55 * longest)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} s" if x <= longest else ""))
    axes.grid(axis="x", color="#E8E8E8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)


def _tint(colour: str) -> tuple[float, ...]:
    """The same colour on a third of the ink."""
    return tuple(1 - (1 - part) * 0.32 for part in to_rgb(colour))


def _label(result: Result, lengths: Lengths, *, cut: bool) -> str:
    text = f"{'≈ ' if lengths.estimated else ''}{seconds_in_words(lengths.whole)}{' →' if cut else ''}"
    return text if result.to_focal is None else f"{text} · {result.to_focal.median:.2f}{TIMES}"
