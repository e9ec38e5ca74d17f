"""The figure of seconds per iteration: one panel per detector, one bar per contender, the share of the loss darker."""

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

from bucketrank.bench.bench_documents import TIMES
from bucketrank.bench.detectors.detector_contenders import BUCKETED, EXACT, FOCAL, NAMES, PAIRWISE, TITLES, USUAL
from bucketrank.bench.detectors.detector_report import size_of
from bucketrank.bench.detectors.detector_results import DetectorBench, DetectorResult
from bucketrank.bench.timing import Spread
from bucketrank.bench.units import seconds_in_words
from bucketrank.provenance.figure_style import INK, STYLE, save_figure
from bucketrank.provenance.machine import in_words

# Okabe and Ito's colours, as in the figure of the losses.
COLOURS = {EXACT: "#0072B2", BUCKETED: "#E69F00", PAIRWISE: "#D55E00", FOCAL: "#444444", USUAL: "#888888"}
# A bar is cut off at this multiple of the longest score-based bar.
LONGEST = 3.0
COLUMNS = 3


class Lengths(NamedTuple):
    """Lengths of a bar in seconds: the step with its quartiles, and the loss in it, which an estimate does not tell."""

    step: Spread
    loss: float | None


def draw_detector_bench(bench: DetectorBench, out: Path) -> list[Path]:
    """Write ``detectors.png`` and ``detectors.svg`` and return their paths."""
    with mpl.rc_context(STYLE):
        return save_figure(_figure(bench), out, "detectors")


def _figure(bench: DetectorBench) -> Figure:
    detectors = bench.settings.detectors
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
        _panel(axes, [bench.find(detector, name) for name in NAMES])
        axes.set_title(TITLES[detector], color=INK, fontsize=10.5, fontweight="bold", loc="left", pad=6)
    for axes in panels[len(detectors) :]:
        axes.set_axis_off()
    left = 0.25 / width
    title = "Seconds per iteration: forward, backward, optimiser"
    figure.text(left, 1 - 0.4 / height, title, fontsize=13, fontweight="bold")
    legend = (
        f"Dark: the loss, forward and backward. Whiskers: quartiles. {TIMES}: ratio to focal on the same candidates."
    )
    if any(result.skipped for result in bench.results):
        legend += " Dashed: estimated, not run."
    figure.text(left, 1 - 0.65 / height, legend, fontsize=9, color="#666666")
    foot = [size_of(bench.settings), in_words(bench.machine)]
    # About 19 letters of this size fit an inch.
    lines = [line for text in foot for line in textwrap.wrap(text, int(19 * width))]
    figure.text(left, 0.12 / height, "\n".join(lines), fontsize=7, color="#777777", linespacing=1.4)
    return figure


def _lengths(result: DetectorResult) -> Lengths | None:
    if result.seconds is not None:
        # The share, not the seconds of the loss: those come from other rounds, which may have been slower.
        share = 0.0 if result.share is None else result.share.median
        return Lengths(result.seconds, result.seconds.median * share)
    seconds = result.estimated_seconds
    return None if seconds is None else Lengths(Spread(seconds, seconds, seconds), loss=None)


def _panel(axes: Axes, results: list[DetectorResult]) -> None:
    all_lengths = {result.contender: _lengths(result) for result in results}
    scored = [lengths.step.high for name in (FOCAL, USUAL) if (lengths := all_lengths[name]) is not None]
    highest = max(lengths.step.high for lengths in all_lengths.values() if lengths is not None)
    longest = min(LONGEST * max(scored), highest)
    for row, result in enumerate(results):
        lengths = all_lengths[result.contender]
        if lengths is None:
            continue
        step, loss = lengths
        colour, drawn = COLOURS[result.contender], min(step.median, longest)
        if loss is None:
            axes.barh(row, drawn, 0.62, color="white", edgecolor=colour, linestyle="--", linewidth=1.0)
        else:
            axes.barh(row, drawn, 0.62, color=_tint(colour), linewidth=0)
            axes.barh(row, min(loss, longest), 0.62, color=colour, linewidth=0)
            if step.high <= longest:
                axes.plot([step.low, step.high], [row, row], color=INK, linewidth=1.1)
        axes.text(
            max(drawn, min(step.high, longest)) + 0.02 * longest,
            row,
            _label(result, lengths, cut=drawn < step.median),
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
    """Return a lighter tint of the colour."""
    return tuple(1 - (1 - part) * 0.32 for part in to_rgb(colour))


def _label(result: DetectorResult, lengths: Lengths, *, cut: bool) -> str:
    estimated = "≈ " if lengths.loss is None else ""
    text = f"{estimated}{seconds_in_words(lengths.step.median)}{' →' if cut else ''}"
    return text if result.to_focal is None else f"{text} · {result.to_focal.median:.2f}{TIMES}"
