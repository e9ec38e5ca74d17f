"""The loss benchmark as JSON, Markdown, figure and terminal output."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks import documents
from benchmarks.documents import (
    TIMES,
    UNITS,
    format_bytes,
    format_count,
    format_launches,
    format_seconds,
    format_size,
    format_spread,
    markdown_table,
    significant,
)
from benchmarks.figures import DARK, LIGHT, METHOD_COLOURS, save_figure
from benchmarks.losses.contenders import (
    BASELINES,
    DELTAS,
    EXACT,
    KERNELS,
    LAUNCHES_RULE,
    LOSSES,
    METHODS,
    QUADRATIC,
    TITLES,
    Mode,
)
from benchmarks.losses.estimate import ESTIMATE_RULE
from benchmarks.losses.flops import sort
from benchmarks.losses.results import DISTURBED, LossBench, LossResult, loss_targets, speedup
from benchmarks.session import device_type
from benchmarks.timing import Spread
from bucketrank.output import GRID, INK, SKY, STYLE
from bucketrank.provenance import format_machine
from bucketrank.settings.paper import OPERATIONS

if TYPE_CHECKING:
    from rich.console import Console

RULES = {
    "time": "forward and backward (torch.sort: the sort alone), float32; the contenders of a cell take turns in one"
    " run, those below 10 ms with an untimed call before each timed one; median, first and third quartile; a ratio is"
    " the median of the ratios of calls in the same round, to eager focal loss, on a GPU to compiled focal loss where"
    " it ran. The CPU is timed by the wall clock, CUDA, ROCm and XPU by events, from an idle device to the end of the"
    " step; on CUDA and ROCm the L2 cache is cleared before",
    "compiled": "torch.compile of the loss, for the shape of the cell, as one graph",
    "graph": "replay of a CUDA graph of the whole step; ranking losses with max_positives, the positives of the cell",
    "memory": "growth of the largest resident size during one step in a process of its own (about 0.1 MB of noise), on"
    " CUDA, ROCm and XPU of the memory in torch's allocator; includes the gradient, not the logits and targets",
    "launches": LAUNCHES_RULE,
    "flops": "+ - * / compare min max count 1, exp and log 8; formulas in benchmarks.losses.flops",
    "estimate": ESTIMATE_RULE,
}


PAPER_CELL = (100_000, 0.1)  # logits and per cent of positives for which the paper's operations of AP fit ours


def to_json(bench: LossBench) -> str:
    """Return all results as JSON, down to the seconds of each call."""
    return documents.json_document("losses", bench.settings.command(), RULES, bench, loss_targets(bench))


def columns_of(bench: LossBench) -> list[tuple[str, Mode]]:
    """Return the contenders of the benchmark and their modes, in the order of the tables."""
    present = {(result.contender, result.mode) for result in bench.results}
    columns: list[tuple[str, Mode]] = [(name, mode) for name in (*METHODS, *BASELINES) for mode in MODES]
    if device_type(bench.settings.device) != "cpu":
        # On a GPU, compiled focal loss is the one to beat.
        columns = list(dict.fromkeys([("focal", "compiled"), ("focal", "eager"), ("focal", "graph"), *columns]))
    return [column for column in columns if column in present]


def reference(bench: LossBench) -> str:
    """Return what the ratios refer to."""
    compiled = any((r.contender, r.mode, r.skipped) == ("focal", "compiled", None) for r in bench.results)
    return f"{'compiled' if compiled and device_type(bench.settings.device) != 'cpu' else 'eager'} focal loss"


def column_title(name: str, mode: Mode) -> str:
    """Return the heading of a contender in a mode."""
    return TITLES[name] if mode == "eager" else f"{TITLES[name]}, {mode}"


def time_cell(result: LossResult, *, spread: Literal["quartiles", "percent", "none"]) -> str:
    """Return the median with its spread and the ratio to focal loss, or the estimate of a skipped contender."""
    text = format_spread(result.seconds, result.estimated_seconds, spread=spread)
    return text if result.to_focal is None else f"{text} · {significant(result.to_focal.median)}{TIMES}"


def memory_cell(result: LossResult) -> str:
    """Return the peak extra memory, or nothing if it was not measured."""
    return "" if result.extra_bytes is None else format_bytes(result.extra_bytes)


def _launches(result: LossResult) -> str:
    return format_launches(result.launches, result.waits)


def paper_operations(bench: LossBench) -> list[str]:
    """Compare the paper's operations of AP and BAP with ours in the cell that fits best; nothing without that cell."""
    size, percent = PAPER_CELL
    results = [bench.find(name, "ap", size, percent, "eager") for name in ("pairwise", "bucketed", "exact-torch")]
    if any(result is None for result in results):
        return []
    pairwise, bucketed, exact = (format_count(result.flops) for result in results if result is not None)
    theirs, theirs_bucketed = (format_count(OPERATIONS[loss]) for loss in ("AP", "BAP"))
    return [
        f"Operations: the paper counts {theirs} for AP and {theirs_bucketed} for BAP, without the number of logits or "
        f"what counts. Its AP fits L = {format_size(size)}, {percent:g} %, where we count {pairwise} for pairwise, "
        f"{bucketed} for bucketed and {exact} for exact. The paper's BAP lies between our count with and without the "
        f"{format_count(sort(size))} comparisons of the sort, which FLOP counters leave out."
    ]


def notes(bench: LossBench) -> list[str]:
    """Return what a reader must know about the numbers: disturbances, skipped contenders and the large batch."""
    lines = [*documents.busy_note(bench.machine), *(f"{LOSSES[loss]}: delta {DELTAS[loss]:g}." for loss in LOSSES)]
    disturbed = [
        f"L = {format_size(size)}, {percent:g} %"
        for size in bench.settings.sizes
        for percent in bench.settings.percent
        if bench.disturbed(size, percent)
    ]
    if disturbed:
        lines.insert(
            0, f"Disturbed: {'; '.join(disturbed)}. A step took more than {DISTURBED:g} times what it took alone."
        )
    skipped = [r for r in bench.results if r.skipped]
    unavailable = {f"{column_title(r.contender, r.mode)}: {r.skipped}." for r in skipped if r.estimated_seconds is None}
    slow = sum(r.estimated_seconds is not None for r in skipped)
    if slow:
        limit = bench.settings.max_seconds_per_cell
        lines.append(
            f"Skipped, as even a few calls would take more than {limit:g} s: {slow} cells. Estimate: {ESTIMATE_RULE}."
        )
    estimate_to_median = [
        r.estimated_seconds / r.seconds.median
        for r in bench.results
        if r.contender in QUADRATIC and r.seconds is not None and r.estimated_seconds is not None
    ]
    if estimate_to_median:
        low, middle, high = (significant(f(estimate_to_median)) for f in (min, statistics.median, max))
        lines.append(
            "Where a method was both timed and estimated, "
            f"the estimate was {middle} (from {low} to {high}) times the median."
        )
    for result in bench.large:
        what = f"{LOSSES[result.loss]} {result.contender}, {result.size:,} logits with {result.positives:,} positives"
        memory = format_bytes(result.extra_bytes)
        lines.append(
            f"{what}: ran in {format_seconds(result.seconds.median)} with {memory} of extra memory, "
            f"{significant(result.to_focal.median)} times the time of focal loss, "
            f"which itself grew {significant(result.focal_growth.median)}-fold."
        )
    return [*lines, *paper_operations(bench), *sorted(unavailable)]


def to_markdown(bench: LossBench, figure: str) -> str:
    """Return the tables as Markdown, with the machine, the rules and the notes."""
    parts = [
        "# Losses: time, memory, operations",
        f"`{bench.settings.command()}`",
        f"Measured on: {format_machine(bench.machine)}.",
        f"![Time and operations over the number of logits]({figure})",
        *mode_tables(bench),
    ]
    columns = columns_of(bench)
    eager = [(name, mode) for name, mode in columns if mode == "eager"]
    for loss, title in LOSSES.items():
        parts += [f"## {title} loss: time", f"Median [quartiles] · ratio to {reference(bench)}."]
        parts.append(_grid(bench, loss, lambda r: time_cell(r, spread="quartiles"), columns))
        if any(r.extra_bytes is not None for r in bench.results):
            parts += [f"## {title} loss: peak extra memory", _grid(bench, loss, memory_cell, columns)]
        if device_type(bench.settings.device) != "cpu":
            parts += [f"## {title} loss: launches / host waits", _grid(bench, loss, _launches, columns)]
        parts += [
            f"## {title} loss: floating-point operations",
            _grid(bench, loss, lambda r: format_count(r.flops), eager),
        ]
    parts += documents.markdown_targets(loss_targets(bench))
    return "\n\n".join([*parts, *documents.markdown_end(RULES, notes(bench))]) + "\n"


def _grid(bench: LossBench, loss: str, cell: Callable[[LossResult], str], columns: Sequence[tuple[str, Mode]]) -> str:
    """Return a table with a row per cell; contenders without any entry are left out."""
    rows = []
    for size in bench.settings.sizes:
        for percent in bench.settings.percent:
            results = [bench.find(name, loss, size, percent, mode) for name, mode in columns]
            rows.append((format_size(size), f"{percent:g} %", *("" if r is None else cell(r) for r in results)))
    kept = [0, 1, *(2 + i for i in range(len(columns)) if any(row[2 + i] for row in rows))]
    head = ("logits", "positives", *(column_title(name, mode) for name, mode in columns))
    return markdown_table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def show_loss_bench(bench: LossBench, console: Console) -> None:
    """Print the tables, with one row per contender and one column per percentage of positives."""
    from rich.table import Table

    columns = columns_of(bench)

    def grid(title: str, loss: str, cell: Callable[[LossResult], str], sizes: tuple[int, ...]) -> None:
        table = Table("logits", "", title=title, title_justify="left", title_style="bold")
        for percent in bench.settings.percent:
            table.add_column(f"{percent:g} % positives", justify="right")
        for size in sizes:
            for name, mode in columns:
                results = [bench.find(name, loss, size, percent, mode) for percent in bench.settings.percent]
                cells = ["" if r is None else cell(r) for r in results]
                # Only the first row of a section names its size.
                label = format_size(size) if (name, mode) == columns[0] else ""
                style = "bold" if name in KERNELS else "dim" if name in BASELINES else ""
                table.add_row(label, column_title(name, mode), *cells, style=style)
            table.add_section()
        console.print(table)

    sizes = bench.settings.sizes
    for loss, title in LOSSES.items():
        if console.width >= 40 + 25 * len(bench.settings.percent):
            spread = "median ± half the quartile range"
            what = f"{title} loss: time, forward + backward ({spread} · ratio to {reference(bench)})"
            grid(what, loss, lambda r: time_cell(r, spread="percent"), sizes)
        else:
            what = f"{title} loss: time, forward + backward (median · ratio to {reference(bench)})"
            grid(what, loss, lambda r: time_cell(r, spread="none"), sizes)
    if any(r.extra_bytes is not None for r in bench.results):
        # Only the largest size here; the Markdown has all of them.
        for loss, title in LOSSES.items():
            grid(f"{title} loss: peak extra memory", loss, memory_cell, sizes[-1:])
    if device_type(bench.settings.device) != "cpu":
        for loss, title in LOSSES.items():
            grid(f"{title} loss: launches / host waits", loss, _launches, sizes[-1:])
    documents.show_end(loss_targets(bench), notes(bench), bench.machine, console)


def write_loss_bench(bench: LossBench, out: Path) -> list[Path]:
    """Write JSON, Markdown, PNG and SVG to the folder ``out`` and return their paths."""
    texts = {"losses.json": to_json(bench), "losses.md": to_markdown(bench, "losses.svg")}
    return [*documents.write_documents(out, texts), *draw_loss_bench(bench, out)]


MODES: tuple[Mode, ...] = get_args(Mode)
USUAL_PERCENT = 1.0  # the table shows the measured percentage of positives that is nearest


def mode_tables(bench: LossBench) -> list[str]:
    """Return headings and Markdown tables for the largest size; nothing if all results are eager."""
    if {result.mode for result in bench.results} <= {"eager"}:
        return []
    size = max(bench.settings.sizes)
    percent = min(bench.settings.percent, key=lambda each: abs(each - USUAL_PERCENT))
    parts = []
    for loss, title in LOSSES.items():
        parts += [
            f"## {title} loss at {format_size(size)} logits, {percent:g} % positives",
            f"Median · ratio to {reference(bench)}; launches / host waits and peak extra memory of an eager step.",
            markdown_table(("", *MODES, "launches / waits", "memory"), _mode_rows(bench, loss, size, percent)),
        ]
    return parts


def _mode_rows(bench: LossBench, loss: str, size: int, percent: float) -> list[list[str]]:
    rows = []
    for name in dict.fromkeys(name for name, _ in columns_of(bench)):
        results = [bench.find(name, loss, size, percent, mode) for mode in MODES]
        eager = results[0]
        if eager is not None:
            on_cpu = device_type(bench.settings.device) == "cpu"
            costs = ["" if on_cpu else _launches(eager), memory_cell(eager)]
            rows.append([TITLES[name], *(_mode_time(result) for result in results), *costs])
    return rows


def _mode_time(result: LossResult | None) -> str:
    if result is None:
        return ""
    if result.seconds is None:
        return "skipped"
    ratio = "" if result.to_focal is None else f" · {significant(result.to_focal.median)}{TIMES}"
    return format_seconds(result.seconds.median) + ratio


class Line(NamedTuple):
    """Label, colour and line of a contender, the same in every panel."""

    label: str
    colour: str
    width: float
    marker: str
    style: str | tuple[int, tuple[int, int]] = "-"


# The markers keep the lines distinct in print.
LINES = {
    "sort": Line("torch.sort", LIGHT, 1.2, "", ":"),
    "focal": Line("focal loss", DARK, 1.6, "v", (0, (4, 2))),
    "focal, compiled": Line("focal, compiled", DARK, 1.6, "v"),
    "pairwise": Line("pairwise", METHOD_COLOURS["pairwise"], 1.6, "s"),
    "bucketed": Line("bucketed", METHOD_COLOURS["bucketed"], 1.6, "^"),
    "exact-torch": Line("exact, torch ops", SKY, 1.6, "D"),
    "exact-fused": Line("exact, fused", METHOD_COLOURS["exact"], 2.6, "o"),
    "exact-triton": Line("exact, Triton", METHOD_COLOURS["exact"], 2.6, "o"),
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
        *((loss, "time", _time_point, _duration) for loss in LOSSES),
        *((loss, "operations", _operation_point, _number) for loss in LOSSES),
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


def _time_point(result: LossResult) -> Point | None:
    if result.seconds is not None:
        return Point(result.size, result.seconds.median, result.seconds.low, result.seconds.high, estimated=False)
    if result.estimated_seconds is not None:
        y = result.estimated_seconds
        return Point(result.size, y, y, y, estimated=True)
    return None


def _operation_point(result: LossResult) -> Point:
    return Point(result.size, result.flops, result.flops, result.flops, estimated=False)


def _lines(
    bench: LossBench, loss: str, percent: float, what: str, point: Callable[[LossResult], Point | None]
) -> dict[str, list[Point]]:
    """Return the points of each contender; operations do not depend on the backend, so ``exact`` has one line."""
    lines = {}
    for name in LINES:
        contender, _, compiled = name.partition(", ")
        mode: Mode = "compiled" if compiled else "eager"
        results = (bench.find(contender, loss, size, percent, mode) for size in sorted(bench.settings.sizes))
        points = [p for p in (point(result) for result in results if result is not None) if p is not None]
        if points and not (what == "operations" and name in ("exact-torch", "focal, compiled")):
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
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: words(y)))
    axes.grid(axis="y", color=GRID, linewidth=0.7)
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
    figure.text(left, 0.018, format_machine(bench.machine), fontsize=7, color="#777777")
