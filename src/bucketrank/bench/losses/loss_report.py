"""The benchmark of the losses as JSON, as Markdown and in the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bucketrank.bench import bench_documents as documents
from bucketrank.bench.bench_documents import TIMES, launches_in_words, markdown_table, spread_in_words
from bucketrank.bench.flags import device_type
from bucketrank.bench.losses.loss_contenders import BASELINES, DELTAS, KERNELS, LOSSES, METHODS, QUADRATIC, TITLES
from bucketrank.bench.losses.loss_launches import LAUNCHES_RULE
from bucketrank.bench.losses.loss_modes import Mode
from bucketrank.bench.losses.loss_results import DISTURBED, LossBench, LossResult
from bucketrank.bench.losses.loss_targets import loss_targets
from bucketrank.bench.losses.mode_table import MODES, mode_tables
from bucketrank.bench.losses.step_estimate import ESTIMATE_RULE
from bucketrank.bench.units import bytes_in_words, count_in_words, seconds_in_words, significant, size_in_words
from bucketrank.provenance.machine import in_words

if TYPE_CHECKING:
    from rich.console import Console

RULES = {
    "time": "forward and backward (torch.sort: the sort alone), float32; the contenders of a cell take turns in one"
    " run, those below 10 ms with an untimed call before each timed one; median, first and third quartile; a ratio is"
    " the median of the ratios of calls in the same round, to eager focal loss. The CPU is timed by the wall clock,"
    " CUDA, ROCm and XPU by events, from an idle device to the end of the step",
    "compiled": "torch.compile of the loss, for the shape of the cell, as one graph",
    "graph": "replay of a CUDA graph of the whole step; ranking losses with max_positives, the positives of the cell",
    "memory": "growth of the largest resident size during one step in a process of its own (about 0.1 MB of noise), on"
    " CUDA, ROCm and XPU of the memory in torch's allocator; includes the gradient, not the logits and targets",
    "launches": LAUNCHES_RULE,
    "flops": "+ - * / compare min max count 1, exp and log 8; formulas in bucketrank.bench.losses.flops",
    "estimate": ESTIMATE_RULE,
}


def to_json(bench: LossBench) -> str:
    """Return all results as JSON, down to the seconds of each call."""
    return documents.json_document("losses", bench.settings.command(), RULES, bench, loss_targets(bench))


def columns_of(bench: LossBench) -> list[tuple[str, Mode]]:
    """Return the contenders of the benchmark and their modes, in the order of the tables."""
    present = {(result.contender, result.mode) for result in bench.results}
    return [(name, mode) for name in (*METHODS, *BASELINES) for mode in MODES if (name, mode) in present]


def column_title(name: str, mode: Mode) -> str:
    """Return the heading of a contender in a mode."""
    return TITLES[name] if mode == "eager" else f"{TITLES[name]}, {mode}"


def time_cell(result: LossResult, *, spread: Literal["quartiles", "percent", "none"]) -> str:
    """Return the median with its spread and the ratio to focal loss, or the estimate of a skipped contender."""
    text = spread_in_words(result.seconds, result.estimated_seconds, spread=spread)
    return text if result.to_focal is None else f"{text} · {significant(result.to_focal.median)}{TIMES}"


def memory_cell(result: LossResult) -> str:
    """Return the peak extra memory, or nothing if it was not measured."""
    return "" if result.extra_bytes is None else bytes_in_words(result.extra_bytes)


def launches_cell(result: LossResult) -> str:
    """Return launches and host waits of a step, or nothing if they were not counted."""
    return launches_in_words(result.launches, result.waits)


def flops_cell(result: LossResult) -> str:
    """Return the number of floating-point operations."""
    return count_in_words(result.flops)


def notes(bench: LossBench) -> list[str]:
    """Return what a reader must know about the numbers: disturbances, skipped contenders and the large batch."""
    lines = [*documents.busy_note(bench.machine), *(f"{LOSSES[loss]}: delta {DELTAS[loss]:g}." for loss in LOSSES)]
    disturbed = [
        f"L = {size_in_words(size)}, {percent:g} %"
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
        memory = bytes_in_words(result.extra_bytes)
        lines.append(
            f"{what}: ran in {seconds_in_words(result.seconds.median)} with {memory} of extra memory, "
            f"{significant(result.to_focal.median)} times the time of focal loss, "
            f"which itself grew {significant(result.focal_growth.median)}-fold."
        )
    return [*lines, *sorted(unavailable)]


def to_markdown(bench: LossBench, figure: str) -> str:
    """Return the tables as Markdown, with the machine, the rules and the notes."""
    parts = [
        "# Losses: time, memory, operations",
        f"`{bench.settings.command()}`",
        f"Measured on: {in_words(bench.machine)}.",
        f"![Time and operations over the number of logits]({figure})",
        *mode_tables(bench),
    ]
    columns = columns_of(bench)
    eager = [(name, mode) for name, mode in columns if mode == "eager"]
    for loss, title in LOSSES.items():
        parts += [f"## {title} loss: time", "Median [quartiles] · ratio to focal loss."]
        parts.append(_grid(bench, loss, lambda r: time_cell(r, spread="quartiles"), columns))
        if any(r.extra_bytes is not None for r in bench.results):
            parts += [f"## {title} loss: peak extra memory", _grid(bench, loss, memory_cell, columns)]
        if device_type(bench.settings.device) != "cpu":
            parts += [f"## {title} loss: launches / host waits", _grid(bench, loss, launches_cell, columns)]
        parts += [f"## {title} loss: floating-point operations", _grid(bench, loss, flops_cell, eager)]
    parts += documents.markdown_targets(loss_targets(bench))
    return "\n\n".join([*parts, *documents.markdown_end(RULES, notes(bench))]) + "\n"


def _grid(bench: LossBench, loss: str, cell: Callable[[LossResult], str], columns: Sequence[tuple[str, Mode]]) -> str:
    """Return a table with a row per cell; contenders without any entry are left out."""
    rows = []
    for size in bench.settings.sizes:
        for percent in bench.settings.percent:
            results = [bench.find(name, loss, size, percent, mode) for name, mode in columns]
            rows.append((size_in_words(size), f"{percent:g} %", *("" if r is None else cell(r) for r in results)))
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
                label = size_in_words(size) if (name, mode) == columns[0] else ""
                style = "bold" if name in KERNELS else "dim" if name in BASELINES else ""
                table.add_row(label, column_title(name, mode), *cells, style=style)
            table.add_section()
        console.print(table)

    sizes = bench.settings.sizes
    for loss, title in LOSSES.items():
        if console.width >= 40 + 25 * len(bench.settings.percent):
            what = f"{title} loss: time, forward + backward (median ± half the quartile range · ratio to focal loss)"
            grid(what, loss, lambda r: time_cell(r, spread="percent"), sizes)
        else:
            what = f"{title} loss: time, forward + backward (median · ratio to focal loss)"
            grid(what, loss, lambda r: time_cell(r, spread="none"), sizes)
    if any(r.extra_bytes is not None for r in bench.results):
        # Only the largest size here; the Markdown has all of them.
        for loss, title in LOSSES.items():
            grid(f"{title} loss: peak extra memory", loss, memory_cell, sizes[-1:])
    if device_type(bench.settings.device) != "cpu":
        for loss, title in LOSSES.items():
            grid(f"{title} loss: launches / host waits", loss, launches_cell, sizes[-1:])
    documents.show_end(loss_targets(bench), notes(bench), bench.machine, console)


def write_loss_bench(bench: LossBench, out: Path) -> list[Path]:
    """Write JSON, Markdown, PNG and SVG to the folder ``out`` and return their paths."""
    from bucketrank.bench.losses.loss_figure import draw_loss_bench

    texts = {"losses.json": to_json(bench), "losses.md": to_markdown(bench, "losses.svg")}
    return [*documents.write_documents(out, texts), *draw_loss_bench(bench, out)]
