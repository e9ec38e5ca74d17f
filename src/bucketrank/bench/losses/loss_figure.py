"""The paper's supplementary figure with exact bucketing added: time and operations over the number of logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bucketrank.bench.losses.loss_contenders import EXACT, KERNELS, LOSSES
from bucketrank.bench.losses.loss_results import LossBench, LossResult
from bucketrank.bench.losses.loss_targets import speedup
from bucketrank.bench.timing import Spread
from bucketrank.bench.units import UNITS, significant, size_in_words
from bucketrank.provenance.figure_style import INK, STYLE, save_figure
from bucketrank.provenance.machine import in_words


class Line(NamedTuple):
    """Label, colour and line of a contender, the same in every panel."""

    label: str
    colour: str
    width: float
    marker: str
    style: str | tuple[int, tuple[int, int]] = "-"


# Okabe and Ito's colours, distinct for every colour vision; the markers keep the lines distinct in print.
LINES = {
    "sort": Line("torch.sort", "#AAAAAA", 1.2, "", ":"),
    "focal": Line("focal loss", "#444444", 1.6, "v", (0, (4, 2))),
    "pairwise": Line("pairwise", "#D55E00", 1.6, "s"),
    "bucketed": Line("bucketed", "#E69F00", 1.6, "^"),
    "exact-torch": Line("exact, torch ops", "#56B4E9", 1.6, "D"),
    "exact-fused": Line("exact, fused", "#0072B2", 2.6, "o"),
    "exact-triton": Line("exact, Triton", "#0072B2", 2.6, "o"),
}


class Point(NamedTuple):
    """One marker: number of logits ``x``, value ``y`` with its quartiles, and whether the value is an estimate."""

    x: float
    y: float
    low: float
    high: float
    estimated: bool


def draw_loss_bench(bench: LossBench, out: Path) -> list[Path]:
    """Write ``losses.png`` and ``losses.svg``: time and operations of each loss in rows, percentages in columns."""
    with mpl.rc_context(STYLE):
        return save_figure(_figure(bench), out, "losses")


def _figure(bench: LossBench) -> Figure:
    percents = bench.settings.percent
    rows: list[tuple[str, str, Callable[[LossResult], Point | None], Callable[[float], str]]] = [
        *((loss, "time", _time, _duration) for loss in LOSSES),
        *((loss, "operations", _operations, _number) for loss in LOSSES),
    ]
    width = max(2.6 * len(percents) + 2.2, 9.0)
    figure = Figure(figsize=(width, 10.5))
    heights = [1.3 if what == "time" else 1.0 for _, what, _, _ in rows]
    grid = figure.subplots(len(rows), len(percents), sharex=True, sharey="row", squeeze=False, height_ratios=heights)
    figure.subplots_adjust(left=0.95 / width, right=1 - 1.45 / width, top=0.915, bottom=0.085, hspace=0.16, wspace=0.08)
    for row, (loss, what, point, words) in enumerate(rows):
        for column, percent in enumerate(percents):
            axes = grid[row][column]
            lines = _lines(bench, loss, percent, what, point)
            _panel(axes, lines, bench.settings.sizes, words)
            if what == "time":
                _gap(axes, lines, speedup(bench, loss, max(bench.settings.sizes), percent))
            if row == 0:
                axes.set_title(f"{percent:g} % positives", color=INK, pad=10, fontsize=10)
            if row == len(rows) - 1:
                axes.set_xlabel("logits")
            if column == 0:
                axes.set_ylabel(f"{LOSSES[loss]} loss: {what}", fontsize=10)
    for first in (0, len(LOSSES)):
        # Both losses share a scale for time, and one for operations.
        pair = [grid[row][0] for row in range(first, first + len(LOSSES))]
        limits = [limit for axes in pair for limit in axes.get_ylim()]
        for axes in pair:
            axes.set_ylim(min(limits), max(limits))
    for row, (loss, what, point, _) in enumerate(rows):
        _label_lines(grid[row][-1], _lines(bench, loss, percents[-1], what, point), what)
    _headings(figure, bench)
    return figure


def _time(result: LossResult) -> Point | None:
    if result.seconds is not None:
        return Point(result.size, result.seconds.median, result.seconds.low, result.seconds.high, estimated=False)
    if result.estimated_seconds is not None:
        y = result.estimated_seconds
        return Point(result.size, y, y, y, estimated=True)
    return None


def _operations(result: LossResult) -> Point:
    return Point(result.size, result.flops, result.flops, result.flops, estimated=False)


def _lines(
    bench: LossBench, loss: str, percent: float, what: str, point: Callable[[LossResult], Point | None]
) -> dict[str, list[Point]]:
    """Return the points of each contender; operations do not depend on the backend, so ``exact`` has one line."""
    lines = {}
    for name in LINES:
        results = (bench.find(name, loss, size, percent) for size in sorted(bench.settings.sizes))
        points = [p for p in (point(result) for result in results if result is not None) if p is not None]
        if points and not (what == "operations" and name == "exact-torch"):
            lines[name] = points
    return lines


def _panel(axes: Axes, lines: dict[str, list[Point]], sizes: tuple[int, ...], words: Callable[[float], str]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for order, (name, points) in enumerate(lines.items()):
        line = LINES[name]
        x, y = [p.x for p in points], [p.y for p in points]
        measured = [p for p in points if not p.estimated]
        spread = [p.x for p in measured], [p.low for p in measured], [p.high for p in measured]
        axes.fill_between(*spread, color=line.colour, alpha=0.18, linewidth=0)
        if len(measured) < len(points):
            # Estimates continue the line, thin and dotted.
            axes.plot(x, y, color=line.colour, linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=2 + order)
        axes.plot(
            [p.x for p in measured],
            [p.y for p in measured],
            color=line.colour,
            linewidth=line.width,
            linestyle=line.style,
            zorder=3 + order,
            solid_capstyle="round",
        )
        for p in points:
            face = "white" if p.estimated else line.colour
            axes.plot(p.x, p.y, line.marker, color=line.colour, markerfacecolor=face, markersize=5, zorder=4 + order)
    axes.set_xlim(min(sizes) / 1.5, max(sizes) * 8)
    axes.set_xticks(sizes, [size_in_words(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: words(y)))
    axes.grid(axis="y", color="#E8E8E8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def _duration(y: float) -> str:
    """Return a power of ten as a duration: 10 ms, 1,000 s."""
    unit, name = next((u for u in ((1.0, "s"), (1e-3, "ms")) if y > 0.999 * u[0]), (1e-6, "µs"))
    return f"{y / unit:,.0f} {name}"


def _number(y: float) -> str:
    """Return a power of ten as a count: 100 K, 10 M."""
    unit, name = next((u for u in UNITS if y > 0.999 * u[0]), (1.0, ""))
    return f"{y / unit:,.0f} {name}".strip()


def _gap(axes: Axes, lines: dict[str, list[Point]], faster: tuple[Spread, bool] | None) -> None:
    """Draw an arrow with the ratio pairwise / exact at the largest size."""
    if faster is None:
        return
    spread, estimated = faster
    low, high = next(lines[name] for name in EXACT if name in lines)[-1], lines["pairwise"][-1]
    arrow = {"arrowstyle": "<->", "color": "#999999", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (low.x * 1.5, low.y), (low.x * 1.5, high.y), arrowprops=arrow)
    text = f"{'≈ ' if estimated else ''}{significant(spread.median)}\N{MULTIPLICATION SIGN}"
    axes.text(low.x * 1.7, math.sqrt(low.y * high.y), text, va="center", fontsize=8.5)


def _label_lines(axes: Axes, lines: dict[str, list[Point]], what: str) -> None:
    """Write the labels at the right ends of the lines, moved apart where they would overlap."""
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    ends = sorted((math.log10(points[-1].y), name) for name, points in lines.items())
    levels: list[float] = []
    apart = 0.085 if what == "time" else 0.11
    for y, _ in ends:
        level = (y - low) / (high - low)
        levels.append(max(level, levels[-1] + apart) if levels else level)
    # If the highest label is above the panel, all labels move down.
    over = max(levels[-1] - 1.0, 0.0) if levels else 0.0
    for (_, name), level in zip(ends, levels, strict=True):
        label = "exact" if what == "operations" and name in KERNELS else LINES[name].label
        weight = "bold" if name in KERNELS else "normal"
        axes.text(
            1.03,
            level - over,
            label,
            transform=axes.transAxes,
            color=LINES[name].colour,
            va="center",
            fontsize=9.5,
            fontweight=weight,
        )


def _headings(figure: Figure, bench: LossBench) -> None:
    left = 0.3 / figure.get_figwidth()
    title = "Ranking losses on the paper's synthetic logits: forward + backward"
    figure.text(left, 0.968, title, fontsize=13, fontweight="bold")
    notes = ["Bands: quartiles.", "Arrows: how many times slower the definition is than exact bucketing."]
    if any(r.skipped and r.estimated_seconds for r in bench.results):
        notes.append("Hollow: estimated, not run.")
    if any(bench.disturbed(size, percent) for size in bench.settings.sizes for percent in bench.settings.percent):
        notes.append("Other programs ran during the measurement: measure again.")
    figure.text(left, 0.948, " ".join(notes), fontsize=9, color="#666666")
    figure.text(left, 0.018, in_words(bench.machine), fontsize=7, color="#777777")
