"""The parts of a report that the benches share: tables, targets, documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketrank.bench.bars import Bar
from bucketrank.bench.machine import Machine, busy
from bucketrank.bench.numbers import significant

if TYPE_CHECKING:
    from rich.console import Console

TIMES = "\N{MULTIPLICATION SIGN}"
TARGETS = ("", "where", "measured", "target", "")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown.

    >>> print(markdown_table(("a", "b"), [("1", "2")]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [head, ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bar_row(bar: Bar) -> tuple[str, str, str, str, str]:
    """What, where, the value with its spread, the bar, the verdict."""
    value, low, high = (significant(x) for x in (bar.value, bar.low, bar.high))
    spread = "" if value == low == high else f" [{low}, {high}]"
    but = [word for word, yes in (("estimate", bar.estimated), ("disturbed", bar.disturbed)) if yes]
    verdict = ("passed" if bar.passed else "missed") + (f" ({', '.join(but)})" if but else "")
    measured = f"{'≈ ' if bar.estimated else ''}{value}{spread}"
    return bar.what, bar.where, measured, f"{'≤' if bar.at_most else '≥'} {bar.limit:g}", verdict


def show_bars(bars: Sequence[Bar], console: Console) -> None:
    """Prints the targets, if there are any."""
    from rich.table import Table

    if not bars:
        return
    table = Table(*TARGETS, title="Targets", title_justify="left", title_style="bold")
    for bar in bars:
        *cells, verdict = bar_row(bar)
        table.add_row(*cells, f"[{'green' if bar.passed else 'red'}]{verdict}")
    console.print(table)


def busy_note(machine: Machine) -> list[str]:
    """What to say of a machine that had something else to do."""
    load, cores = machine["load"], machine["cores"]
    told = f"The machine was busy (load {load} on {cores} cores) when the run began: the times may be off."
    return [told] if busy(machine) else []


def json_document(benchmark: str, command: str, rules: Mapping[str, str], study: Any, bars: Sequence[Bar]) -> str:
    """Everything in the dataclass ``study``, to the single call."""
    document = {
        "benchmark": benchmark,
        "command": command,
        "rules": rules,
        **asdict(study),
        "bars": [{**asdict(bar), "passed": bar.passed} for bar in bars],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def write_documents(out: Path, documents: Mapping[str, str]) -> list[Path]:
    """The texts under their names in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / name for name in documents]
    for path, text in zip(paths, documents.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths
