"""The supplementary figure: the losses on synthetic logits, timed by ``bench losses``, as a table of speed-ups."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from bucketrank.bench.contenders import LOSSES
from bucketrank.bench.losses import run
from bucketrank.bench.machine import in_words
from bucketrank.bench.numbers import seconds_in_words, significant, size_in_words
from bucketrank.bench.report import show
from bucketrank.bench.report import write as write_bench
from bucketrank.bench.session import present
from bucketrank.bench.study import Result, Settings, Study
from bucketrank.bench.tables import markdown_table, write_documents
from bucketrank.study.latex import latex_table

TITLE = "Losses on synthetic logits"
PAPER = "The paper: bucketed up to about 40 times faster than pairwise, on a GPU."
APPROXIMATELY = "\N{ALMOST EQUAL TO}"
CONTENDERS = ("pairwise", "bucketed", "exact-torch", "exact-fused", "focal")
HEAD = (
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


# The paper's sizes and percentages, and 20 million logits. What would take longer is estimated from parts.
FULL = Settings(repeats=24, max_seconds_per_cell=8.0, large=True)


def study(out: Path, *, settings: Settings = FULL) -> None:
    """Measure, print, and write everything into the folder ``out``."""
    present(settings, out, run=run, show=show, write=_write)


def _write(measured: Study, out: Path) -> list[Path]:
    cells = _cells(measured)
    rows = {loss: [_row(loss, cell) for key, cell in cells.items() if key[0] == loss] for loss in LOSSES}
    every = [row for group in rows.values() for row in group]
    markdown = [
        f"# {TITLE}",
        "The study `synthetic`: the paper's supplementary figure. Forward and backward, float32, median.",
        markdown_table(HEAD, every),
        f"{PAPER} {APPROXIMATELY}: by estimate, as it would take too long.",
        f"`{measured.settings.command()}`; {in_words(measured.machine)}.",
        "![Time and operations over the number of logits](losses.svg)",
    ]
    documents = {
        "synthetic.md": "\n\n".join(markdown) + "\n",
        "synthetic.csv": _csv(cells),
        "synthetic.tex": latex_table(TITLE, HEAD, list(rows.values())),
    }
    return [*write_bench(measured, out), *write_documents(out, documents)]


Cell = dict[str, Result]


def _cells(measured: Study) -> dict[tuple[str, int, float], Cell]:
    """The results by loss, size and percentage."""
    settings = measured.settings
    found: dict[tuple[str, int, float], Cell] = {}
    for loss in LOSSES:
        for size in settings.sizes:
            for percent in settings.percent:
                cell = {name: measured.find(name, loss, size, percent) for name in CONTENDERS}
                found[loss, size, percent] = {name: result for name, result in cell.items() if result is not None}
    return found


def _row(loss: str, cell: Cell) -> list[str]:
    one = next(iter(cell.values()))
    times = [_time(cell.get(name)) for name in CONTENDERS]
    ratios = [_ratio(cell, "bucketed"), _ratio(cell, "exact-fused", "exact-torch")]
    return [LOSSES[loss], size_in_words(one.size), f"{one.percent:g} %", *times, *ratios]


def _seconds(result: Result | None) -> tuple[float, bool] | None:
    """The median, or the estimate and that it is one."""
    if result is None:
        return None
    if result.seconds is not None:
        return result.seconds.median, False
    return None if result.estimated_seconds is None else (result.estimated_seconds, True)


def _time(result: Result | None) -> str:
    found = _seconds(result)
    return "\N{EN DASH}" if found is None else _mark(estimated=found[1]) + seconds_in_words(found[0])


def _ratio(cell: Cell, *names: str) -> str:
    slow = _seconds(cell.get("pairwise"))
    fast = next((found for name in names if (found := _seconds(cell.get(name))) is not None), None)
    if slow is None or fast is None:
        return "\N{EN DASH}"
    return _mark(estimated=slow[1] or fast[1]) + significant(slow[0] / fast[0])


def _mark(*, estimated: bool) -> str:
    return f"{APPROXIMATELY} " if estimated else ""


def _csv(cells: dict[tuple[str, int, float], Cell]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["loss", "logits", "percent", "contender", "seconds", "estimated"])
    for (loss, size, percent), cell in cells.items():
        for name, result in cell.items():
            found = _seconds(result)
            if found is not None:
                writer.writerow([loss, size, percent, name, f"{found[0]:.6g}", int(found[1])])
    return text.getvalue()
