"""A study as JSON, as Markdown and on the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bucketrank.bench.bars import bars
from bucketrank.bench.contenders import BASELINES, DELTAS, LOSSES, METHODS, QUADRATIC, TITLES
from bucketrank.bench.estimate import HOW
from bucketrank.bench.machine import in_words
from bucketrank.bench.numbers import bytes_in_words, count_in_words, seconds_in_words, significant, size_in_words
from bucketrank.bench.study import DISTURBED, Result, Study
from bucketrank.bench.tables import (
    TARGETS,
    TIMES,
    bar_row,
    busy_note,
    json_document,
    markdown_table,
    show_bars,
    write_documents,
)

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = (*METHODS, *BASELINES)
RULES = {
    "time": "forward and backward (torch.sort: the sort alone), float32; the contenders of a cell take turns in one"
    " run, those below 10 ms with an untimed call before each timed one; median, first and third quartile; a ratio is"
    " the median of the ratios of calls in the same round",
    "memory": "growth of the largest resident size during one step in a process of its own, the gradient included,"
    " logits and targets not (on CUDA: of the allocated memory); some 0.1 MB of noise",
    "flops": "+ - * / compare min max count 1, exp and log 8; formulas in bucketrank.bench.flops",
    "estimate": HOW,
}


def to_json(study: Study) -> str:
    """Everything, to the single call."""
    return json_document("losses", study.settings.command(), RULES, study, bars(study))


def time_cell(result: Result, *, spread: Literal["quartiles", "percent", "none"]) -> str:
    """Median, spread, and the ratio to focal loss; or the reason why there is none."""
    if result.seconds is None:
        if result.estimated_seconds is None:
            return "n/a"
        return f"skipped, ≈ {seconds_in_words(result.estimated_seconds)}"
    median, low, high = result.seconds.median, result.seconds.low, result.seconds.high
    text = seconds_in_words(median, low, high) if spread == "quartiles" else seconds_in_words(median)
    if spread == "percent":
        text += f" ±{50 * (high - low) / median:.0f} %"
    return text if result.to_focal is None else f"{text} · {significant(result.to_focal.median)}{TIMES}"


def memory_cell(result: Result) -> str:
    """Peak extra memory."""
    return "" if result.extra_bytes is None else bytes_in_words(result.extra_bytes)


def flops_cell(result: Result) -> str:
    """Operations."""
    return count_in_words(result.flops)


def notes(study: Study) -> list[str]:
    """What a reader has to know about the numbers, with what was left out and why."""
    lines = [*busy_note(study.machine), *(f"{LOSSES[loss]}: delta {DELTAS[loss]:g}." for loss in LOSSES)]
    disturbed = [
        f"L = {size_in_words(size)}, {percent:g} %"
        for size in study.settings.sizes
        for percent in study.settings.percent
        if study.disturbed(size, percent)
    ]
    if disturbed:
        lines.insert(
            0, f"Disturbed: {'; '.join(disturbed)}. A step took more than {DISTURBED:g} times what it took alone."
        )
    skipped = [r for r in study.results if r.skipped]
    absent = {f"{TITLES[r.contender]}: {r.skipped}." for r in skipped if r.estimated_seconds is None}
    slow = sum(r.estimated_seconds is not None for r in skipped)
    if slow:
        limit = study.settings.max_seconds_per_cell
        lines.append(f"Skipped, as even a few calls would take more than {limit:g} s: {slow} cells. Estimate: {HOW}.")
    both = [
        r.estimated_seconds / r.seconds.median
        for r in study.results
        if r.contender in QUADRATIC and r.seconds is not None and r.estimated_seconds is not None
    ]
    if both:
        low, middle, high = (significant(f(both)) for f in (min, statistics.median, max))
        lines.append(f"Where it was measured too, the estimate was {middle} (from {low} to {high}) times the median.")
    for result in study.large:
        what = f"{LOSSES[result.loss]} {result.contender}, {result.size:,} logits with {result.positives:,} positives"
        memory = bytes_in_words(result.extra_bytes)
        lines.append(
            f"{what}: ran in {seconds_in_words(result.seconds.median)} with {memory} of extra memory, "
            f"{significant(result.to_focal.median)} times the time of focal loss, "
            f"which itself grew {significant(result.focal_growth.median)}-fold."
        )
    return [*lines, *sorted(absent)]


def to_markdown(study: Study, figure: str) -> str:
    """Tables for people, with what they were measured on."""
    parts = [
        "# Losses: time, memory, operations",
        f"`{study.settings.command()}`",
        f"Measured on: {in_words(study.machine)}.",
        f"![Time and operations over the number of logits]({figure})",
    ]
    for loss, title in LOSSES.items():
        parts += [f"## {title} loss: time", "Median [quartiles] · ratio to focal loss."]
        parts.append(_grid(study, loss, lambda r: time_cell(r, spread="quartiles")))
        if any(r.extra_bytes is not None for r in study.results):
            parts += [f"## {title} loss: peak extra memory", _grid(study, loss, memory_cell)]
        parts += [f"## {title} loss: floating-point operations", _grid(study, loss, flops_cell)]
    judged = bars(study)
    if judged:
        parts += ["## Targets", markdown_table(TARGETS, [bar_row(bar) for bar in judged])]
    parts += ["## How it was measured", "\n".join(f"- {name}: {rule}." for name, rule in RULES.items())]
    parts += ["## Notes", "\n".join(f"- {line}" for line in notes(study))]
    return "\n\n".join(parts) + "\n"


def _grid(study: Study, loss: str, cell: Callable[[Result], str]) -> str:
    rows = []
    for size in study.settings.sizes:
        for percent in study.settings.percent:
            found = (study.find(name, loss, size, percent) for name in COLUMNS)
            rows.append((size_in_words(size), f"{percent:g} %", *("" if r is None else cell(r) for r in found)))
    return markdown_table(("logits", "positives", *(TITLES[name] for name in COLUMNS)), rows)


def show(study: Study, console: Console) -> None:
    """Prints the tables: a row a contender, a column a percentage."""
    from rich.table import Table

    def grid(title: str, loss: str, cell: Callable[[Result], str], sizes: tuple[int, ...]) -> None:
        table = Table("logits", "", title=title, title_justify="left", title_style="bold")
        for percent in study.settings.percent:
            table.add_column(f"{percent:g} % positives", justify="right")
        for size in sizes:
            for name in COLUMNS:
                found = [study.find(name, loss, size, percent) for percent in study.settings.percent]
                cells = ["" if r is None else cell(r) for r in found]
                # The first row of a section names its size; exact is what the table is about.
                label = size_in_words(size) if name == COLUMNS[0] else ""
                style = "bold" if name == "exact-fused" else "dim" if name in BASELINES else ""
                table.add_row(label, TITLES[name], *cells, style=style)
            table.add_section()
        console.print(table)

    sizes = study.settings.sizes
    for loss, title in LOSSES.items():
        if console.width >= 40 + 25 * len(study.settings.percent):
            what = f"{title} loss: time, forward + backward (median ± half the quartile range · ratio to focal loss)"
            grid(what, loss, lambda r: time_cell(r, spread="percent"), sizes)
        else:
            what = f"{title} loss: time, forward + backward (median · ratio to focal loss)"
            grid(what, loss, lambda r: time_cell(r, spread="none"), sizes)
    if any(r.extra_bytes is not None for r in study.results):
        # The largest size says it all; the Markdown has the others.
        for loss, title in LOSSES.items():
            grid(f"{title} loss: peak extra memory", loss, memory_cell, sizes[-1:])
    show_bars(bars(study), console)
    for line in notes(study):
        console.print(f"· {line}", style="dim", highlight=False)
    console.print(in_words(study.machine), style="dim", highlight=False)


def write(study: Study, out: Path) -> list[Path]:
    """JSON, Markdown, PNG and SVG in ``out``."""
    from bucketrank.bench.figures import draw_study

    documents = {"losses.json": to_json(study), "losses.md": to_markdown(study, "losses.svg")}
    return [*write_documents(out, documents), *draw_study(study, out)]
