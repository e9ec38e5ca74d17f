"""The study ``synthetic``: the loss benchmark as a table of speed-ups (the paper's supplement)."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from benchmarks.documents import format_seconds, format_size, markdown_table, significant, write_documents
from benchmarks.losses.contenders import LOSSES
from benchmarks.losses.measure import measure_losses
from benchmarks.losses.report import show_loss_bench, write_loss_bench
from benchmarks.losses.results import LossBench, LossBenchSettings, LossResult
from benchmarks.session import present
from benchmarks.study.tables import latex_table
from benchmarks.timing import Samples, ratio
from bucketrank.provenance import format_machine

TITLE = "Losses on synthetic logits"
PAPER = "The paper: bucketed up to about 40 times faster than pairwise, on a GPU."
APPROXIMATELY = "\N{ALMOST EQUAL TO}"
CONTENDERS = ("pairwise", "bucketed", "exact-torch", "exact-fused", "focal")
COLUMNS = (
    "loss",
    "logits",
    "positives",
    "pairwise",
    "bucketed",
    "exact, torch ops",
    "exact, fused",
    "focal",
    "pairwise / bucketed",
    "pairwise / exact",
)


# The paper's sizes and percentages, and 20 million logits. Slower contenders are estimated from parts.
FULL = LossBenchSettings(repeats=24, max_seconds_per_cell=8.0, large=True)


def run_synthetic_study(out: Path, *, settings: LossBenchSettings = FULL) -> None:
    """Measure the losses, print the tables, and write the tables and figures to the folder ``out``."""
    present(settings, out, measure=measure_losses, show=show_loss_bench, write=_write)


def _write(bench: LossBench, out: Path) -> list[Path]:
    cells = _cells(bench)
    rows = {loss: [_row(loss, cell) for key, cell in cells.items() if key[0] == loss] for loss in LOSSES}
    all_rows = [row for group in rows.values() for row in group]
    markdown = [
        f"# {TITLE}",
        "The study `synthetic`: the paper's supplementary figure. Forward and backward, float32, median.",
        markdown_table(COLUMNS, all_rows),
        f"{PAPER} {APPROXIMATELY}: estimated, because a measurement would take too long.",
        f"`{bench.settings.command()}`; {format_machine(bench.machine)}.",
        "![Time and operations over the number of logits](losses.svg)",
    ]
    documents = {
        "synthetic.md": "\n\n".join(markdown) + "\n",
        "synthetic.csv": _csv(cells),
        "synthetic.tex": latex_table(TITLE, COLUMNS, list(rows.values())),
    }
    return [*write_loss_bench(bench, out), *write_documents(out, documents)]


Cell = dict[str, LossResult]


def _cells(bench: LossBench) -> dict[tuple[str, int, float], Cell]:
    """Return the results of the contenders by loss, size and percentage."""
    settings = bench.settings
    cells: dict[tuple[str, int, float], Cell] = {}
    for loss in LOSSES:
        for size in settings.sizes:
            for percent in settings.percent:
                results = {name: bench.find(name, loss, size, percent) for name in CONTENDERS}
                cells[loss, size, percent] = {name: result for name, result in results.items() if result is not None}
    return cells


def _row(loss: str, cell: Cell) -> list[str]:
    first = next(iter(cell.values()))
    times = [_time(cell.get(name)) for name in CONTENDERS]
    ratios = [_ratio(cell, "bucketed"), _ratio(cell, "exact-fused", "exact-torch")]
    return [LOSSES[loss], format_size(first.size), f"{first.percent:g} %", *times, *ratios]


def _seconds(result: LossResult | None) -> tuple[float, bool] | None:
    """Return the seconds of a step, and whether they are an estimate; None if neither was measured."""
    if result is None:
        return None
    if result.seconds is not None:
        return result.seconds.median, False
    return None if result.estimated_seconds is None else (result.estimated_seconds, True)


def _time(result: LossResult | None) -> str:
    timed = _seconds(result)
    return "\N{EN DASH}" if timed is None else _mark(estimated=timed[1]) + format_seconds(timed[0])


def _ratio(cell: Cell, *names: str) -> str:
    """Return the median of pairwise / other over the rounds, as in ``losses``; ``names`` are the others."""
    slow = _samples(cell.get("pairwise"))
    fast = next((samples for name in names if (samples := _samples(cell.get(name))) is not None), None)
    if slow is None or fast is None:
        return "\N{EN DASH}"
    return _mark(estimated=slow[1] or fast[1]) + significant(ratio(slow[0], fast[0]).median)


def _samples(result: LossResult | None) -> tuple[Samples, bool] | None:
    """Return the seconds of each round, and whether they are estimates; None if there are none."""
    if result is None or not (samples := result.samples or result.estimated_samples):
        return None
    return samples, not result.samples


def _mark(*, estimated: bool) -> str:
    return f"{APPROXIMATELY} " if estimated else ""


def _csv(cells: dict[tuple[str, int, float], Cell]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["loss", "logits", "percent", "contender", "seconds", "estimated"])
    for (loss, size, percent), cell in cells.items():
        for name, result in cell.items():
            timed = _seconds(result)
            if timed is not None:
                writer.writerow([loss, size, percent, name, f"{timed[0]:.6g}", int(timed[1])])
    return text.getvalue()
