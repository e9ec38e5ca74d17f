"""The detector benchmark as JSON, Markdown, figure and terminal output."""

from __future__ import annotations

import math
import textwrap
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from benchmarks import documents
from benchmarks.detectors.contenders import BUCKETED, EXACT, FOCAL, NAMES, PAIRWISE, SCORED_TITLES, TITLES, USUAL
from benchmarks.detectors.measure import COST_RULES, SHARE_RULE, loss_rounds
from benchmarks.detectors.results import DetectorBench, DetectorBenchSettings, DetectorResult, spell_image_size
from benchmarks.documents import (
    TIMES,
    PerformanceTarget,
    busy,
    format_bytes,
    format_launches,
    format_seconds,
    format_spread,
    markdown_table,
    performance_target,
    significant,
)
from benchmarks.figures import DARK, METHOD_COLOURS, save_figure
from benchmarks.session import device_type
from benchmarks.timing import Spread
from bucketrank.output import GREY, GRID, INK, STYLE
from bucketrank.provenance import format_machine
from bucketrank.settings.paper import SCORE_BASED, PaperRow, paper_rows

if TYPE_CHECKING:
    from rich.console import Console

# Maximum T_iter ratio of the exact method to focal loss on the same candidates.
TO_FOCAL = 1.05
RULES = {
    "step": "forward, backward and optimiser (SGD with momentum and weight decay, at a learning rate of 0: the"
    " arithmetic is that of training, the weights and hence the proposals stay the same), float32, random weights",
    "time": "the contenders of a detector take turns in one run, in changing order; median, first and third quartile;"
    " a ratio is the median of the ratios of steps in the same round. The CPU is timed by the wall clock, CUDA, ROCm"
    " and XPU by events, from an idle device to the end of the step",
    "loss": SHARE_RULE,
    "by the loss": "1 + (the loss's time - focal loss's time) / the step with focal loss: the ratio if the steps"
    " differed in the loss alone, without the noise of the rest of the step",
    "focal": "the score-based loss on the same candidates: every anchor and every proposal, with the ranking loss's"
    " anchors and box loss; under it ATSS and PAA keep the branch that predicts centerness or IoU",
    "usual": "the loss the detector is usually trained with: cross-entropy on 256 anchors and 512 proposals per image"
    " for the R-CNNs, otherwise focal loss with the detector's own anchors",
    "estimate": "the time of the step with the exact method, plus the time of the loss alone on its logits, timed with"
    " a part of the positives and extrapolated by the formula for the operations",
    **COST_RULES,
}
LEGEND = {
    EXACT: "rs/exact",
    BUCKETED: "rs/bucketed",
    PAIRWISE: "rs/pairwise",
    FOCAL: "focal, same candidates",
    USUAL: "usual baseline",
}


def detector_targets(bench: DetectorBench) -> list[PerformanceTarget]:
    """Build the target of every detector: the T_iter ratio exact / focal."""
    what, flags = "T_iter rs/exact / focal", {"at_most": True, "disturbed": busy(bench.machine)}
    ratios = {TITLES[detector]: bench.find(detector, EXACT).to_focal for detector in bench.settings.detectors}
    return [performance_target(what, where, ratio, TO_FOCAL, **flags) for where, ratio in ratios.items() if ratio]


def to_json(bench: DetectorBench) -> str:
    """Format all results as JSON, down to the seconds of each step."""
    return documents.json_document("detectors", bench.settings.command(), RULES, bench, detector_targets(bench))


def size_of(settings: DetectorBenchSettings) -> str:
    """Describe the backbone, the images and the head sizes."""
    images = f"{settings.batch} image{'s' * (settings.batch != 1)}"
    objects = f"{settings.objects} object{'s' * (settings.objects != 1)}"
    return (
        f"{settings.backbone}, {spell_image_size(settings.image_size)} pixels, {images} with {objects} each, "
        f"{settings.classes} classes, {settings.channels} channels, {settings.proposals:,} proposals in the R-CNNs"
    )


def time_cell(result: DetectorResult, *, spread: Literal["quartiles", "percent"]) -> str:
    """Format the median with its spread, or the estimate of a skipped contender."""
    return format_spread(result.seconds, result.estimated_seconds, spread=spread)


def times_cell(ratio: Spread | None, *, quartiles: bool = False) -> str:
    """Format a ratio; empty if there is none."""
    if ratio is None:
        return ""
    spread = f" [{ratio.low:.3f}, {ratio.high:.3f}]" if quartiles else ""
    return f"{ratio.median:.3f}{TIMES}{spread}"


def loss_cells(result: DetectorResult) -> tuple[str, str, str]:
    """Format the loss time, its fraction of the step, and the ratio to focal if only the loss differed."""
    if result.loss_seconds is None or result.share is None:
        return "", "", ""
    share = f"{100 * result.share.median:.1f} %"
    return format_seconds(result.loss_seconds.median), share, times_cell(result.loss_to_focal)


def cost_cells(result: DetectorResult) -> tuple[str, str, str]:
    """Format launches and device syncs of a step and its losses, and the peak memory, in the order of ``COSTS``."""
    costs = result.costs
    if costs is None:
        return "", "", ""
    memory = "" if costs.extra_bytes is None else format_bytes(costs.extra_bytes)
    whole, losses = (costs.launches, costs.waits), (costs.loss_launches, costs.loss_waits)
    return format_launches(*whole), format_launches(*losses), memory


def _cost_rows(bench: DetectorBench) -> list[tuple[str, ...]]:
    return [
        (TITLES[detector], result.title, *cost_cells(result))
        for detector in bench.settings.detectors
        for result in (bench.find(detector, name) for name in NAMES)
    ]


def head_cells(result: DetectorResult) -> tuple[str, str]:
    """Format the logit counts per head, and the positives among the candidates."""
    logits = [f"{head.candidates:,}" + (f"{TIMES}{head.classes}" if head.classes > 1 else "") for head in result.heads]
    return _sum(logits), _sum([f"{head.positives:,}" for head in result.heads])


def _sum(cells: list[str]) -> str:
    """Join the cells to a sum; equal neighbours, such as decoder layers, become a multiple."""
    groups = [(cell, len(list(equal))) for cell, equal in groupby(cells)]
    return " + ".join(cell if count == 1 else f"{count} ({cell})" for cell, count in groups)


def notes(bench: DetectorBench) -> list[str]:
    """Write notes for readers, including the skipped contenders."""
    lines = [*documents.busy_note(bench.machine), f"Measured with {size_of(bench.settings)}."]
    rounds, more = bench.settings.rounds, loss_rounds(bench.settings)
    lines.append(f"{rounds} rounds for T_iter, {more} more for the loss's part of it.")
    skipped = [r for r in bench.results if r.skipped]
    return [*lines, *(f"{TITLES[r.detector]}, {r.title}: skipped, {r.skipped}." for r in skipped)]


def to_markdown(bench: DetectorBench, figure: str) -> str:
    """Format the tables as Markdown, with the machine, the paper's numbers, the rules and the notes."""
    detectors = bench.settings.detectors
    grid = [(TITLES[detector], *(_grid_cell(bench.find(detector, name)) for name in NAMES)) for detector in detectors]
    details = []
    for detector in detectors:
        for name in NAMES:
            result = bench.find(detector, name)
            ratios = times_cell(result.to_focal, quartiles=True), times_cell(result.to_usual, quartiles=True)
            times = time_cell(result, spread="quartiles")
            details.append((TITLES[detector], result.title, times, *ratios, *loss_cells(result), *head_cells(result)))
    usual = "; ".join(f"{TITLES[name]}: {SCORED_TITLES[name][1]}" for name in detectors)
    parts = [
        "# Detectors: seconds per iteration",
        f"`{bench.settings.command()}`",
        f"{size_of(bench.settings)}. Measured on: {format_machine(bench.machine)}.",
        f"![Seconds per iteration, and the loss's part of them]({figure})",
        "## T_iter",
        "Median · ratio to focal loss on the same candidates · the loss's share of the step.",
        markdown_table(("detector", *LEGEND.values()), grid),
        f"Usual baselines: {usual}.",
        *documents.markdown_targets(detector_targets(bench)),
        "## Beside the paper",
        f"The paper's T_iter in seconds (ResNet-50, 800x1333, {_hardware(paper_rows()[0])}), and ours."
        " Ratios carry over to other machines better than seconds do.",
        markdown_table(
            (
                "detector",
                "paper: RS",
                "paper: BRS",
                "paper: score-based",
                "paper: BRS / score-based",
                "paper: others",
                "rs/pairwise",
                "rs/bucketed",
                "rs/exact",
                "usual",
                "rs/exact / usual",
            ),
            [_beside(bench, detector) for detector in detectors],
        ),
        "## Details",
        "Median [quartiles]; candidates times classes that enter the loss of each head, and positives.",
        markdown_table(("detector", "loss", "T_iter", "/ focal", "/ usual", *DETAILS), details),
        "## Launches / host waits, and memory",
        "Of a whole step, and of the forward and backward pass of its losses; peak extra memory of a step.",
        markdown_table(("detector", "loss", *COSTS), [row for row in _cost_rows(bench) if any(row[2:])]),
        *documents.markdown_end(RULES, notes(bench)),
    ]
    return "\n\n".join(parts) + "\n"


DETAILS = ("loss's time", "share", "/ focal by the loss", "candidates", "positives")
COSTS = ("step", "losses", "memory")


def _grid_cell(result: DetectorResult) -> str:
    if result.seconds is None:
        return time_cell(result, spread="percent")
    return f"{format_seconds(result.seconds.median)} · {times_cell(result.to_focal)} · {loss_cells(result)[1]}"


def _beside(bench: DetectorBench, detector: str) -> tuple[str, ...]:
    ours = []
    for name in (PAIRWISE, BUCKETED, EXACT, USUAL):
        result = bench.find(detector, name)
        if result.seconds is not None:
            ours.append(significant(result.seconds.median))
        else:
            ours.append("" if result.estimated_seconds is None else f"≈ {significant(result.estimated_seconds)}")
    return (TITLES[detector], *_published(detector), *ours, times_cell(bench.find(detector, EXACT).to_usual))


def _published(detector: str) -> tuple[str, ...]:
    """Return the paper's T_iter of RS, of BRS and of the score-based loss, the ratio of the last two, and the rest."""
    timed = [row for row in paper_rows() if row.detector == detector and "seconds" in row.numbers]
    rows = {row.loss: row for row in timed if (row.backbone, row.dataset) == ("R-50", "COCO")}
    seconds = {loss: row.numbers["seconds"] for loss, row in rows.items()}
    scored = next((loss for loss in rows if loss in SCORE_BASED), "")
    columns = ("RS", "BRS", scored)
    texts = [rows[loss].texts()["seconds"] if loss in rows else "" for loss in columns]
    over = f"{seconds['BRS'] / seconds[scored]:.2f}{TIMES}" if "BRS" in seconds and scored else ""
    others = [f"{loss} {row.texts()['seconds']}" for loss, row in rows.items() if loss not in columns]
    others += dict.fromkeys(_hardware(row) for row in rows.values() if row.hardware != paper_rows()[0].hardware)
    return (*texts, over, ", ".join(others))


def _hardware(row: PaperRow) -> str:
    return row.hardware.replace(", ", " with ")


def show_detector_bench(bench: DetectorBench, console: Console) -> None:
    """Print the table, with one section per detector and one row per contender."""
    from rich.table import Table

    wide = console.width >= 130
    title = "Seconds per iteration (median ± half the quartile range; ratios of steps in the same round)"
    table = Table("", "loss", title=title, title_justify="left", title_style="bold")
    for head in ("T_iter", "/ focal", "/ usual", *(DETAILS if wide else DETAILS[:2])):
        table.add_column(head, justify="right")
    for detector in bench.settings.detectors:
        for name in NAMES:
            result = bench.find(detector, name)
            cells = [time_cell(result, spread="percent"), times_cell(result.to_focal), times_cell(result.to_usual)]
            cells += [*loss_cells(result), *head_cells(result)] if wide else loss_cells(result)[:2]
            # Only the first row of a section names its detector.
            label = TITLES[detector] if name == NAMES[0] else ""
            style = "bold" if name == EXACT else "dim" if name in (FOCAL, USUAL) else ""
            table.add_row(label, result.title, *cells, style=style)
        table.add_section()
    console.print(table)
    if device_type(bench.settings.device) != "cpu":
        title = "Launches / host waits of a step and of its losses, and peak extra memory"
        table = Table("", "loss", *COSTS, title=title, title_justify="left", title_style="bold")
        for row in _cost_rows(bench):
            table.add_row(*row)
        console.print(table)
    documents.show_end(detector_targets(bench), notes(bench), bench.machine, console)


def write_detector_bench(bench: DetectorBench, out: Path) -> list[Path]:
    """Write JSON, Markdown, PNG and SVG to the folder ``out`` and return their paths."""
    texts = {"detectors.json": to_json(bench), "detectors.md": to_markdown(bench, "detectors.svg")}
    return [*documents.write_documents(out, texts), *draw_detector_bench(bench, out)]


COLOURS = {
    EXACT: METHOD_COLOURS["exact"],
    BUCKETED: METHOD_COLOURS["bucketed"],
    PAIRWISE: METHOD_COLOURS["pairwise"],
    FOCAL: DARK,
    USUAL: GREY,
}
# A bar is cut off at this multiple of the longest score-based bar.
LONGEST = 3.0
COLUMNS = 3


class Lengths(NamedTuple):
    """Bar lengths in seconds: the step with its quartiles, and the loss in it unless the step is an estimate."""

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
    foot = [size_of(bench.settings), format_machine(bench.machine)]
    # About 19 letters of this size fit an inch.
    lines = [line for text in foot for line in textwrap.wrap(text, int(19 * width))]
    figure.text(left, 0.12 / height, "\n".join(lines), fontsize=7, color="#777777", linespacing=1.4)
    return figure


def _lengths(result: DetectorResult) -> Lengths | None:
    if result.seconds is not None:
        # Use the loss fraction, not its seconds, which come from other rounds that may have been slower.
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
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)


def _tint(colour: str) -> tuple[float, ...]:
    """Return a lighter tint of the colour."""
    return tuple(1 - (1 - part) * 0.32 for part in to_rgb(colour))


def _label(result: DetectorResult, lengths: Lengths, *, cut: bool) -> str:
    estimated = "≈ " if lengths.loss is None else ""
    text = f"{estimated}{format_seconds(lengths.step.median)}{' →' if cut else ''}"
    return text if result.to_focal is None else f"{text} · {result.to_focal.median:.2f}{TIMES}"
