"""Parts of a benchmark's documents: Markdown tables, performance targets, notes and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketrank.bench.performance_target import PerformanceTarget
from bucketrank.bench.units import significant
from bucketrank.provenance.machine import Machine, busy

if TYPE_CHECKING:
    from rich.console import Console

TIMES = "\N{MULTIPLICATION SIGN}"
TARGET_COLUMNS = ("", "where", "measured", "target", "")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table.

    >>> print(markdown_table(("a", "b"), [("1", "2")]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [head, ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def target_row(target: PerformanceTarget) -> tuple[str, str, str, str, str]:
    """Return the cells of one target in the order of ``TARGET_COLUMNS``; the last is the verdict."""
    value, low, high = (significant(x) for x in (target.value, target.low, target.high))
    spread = "" if value == low == high else f" [{low}, {high}]"
    caveats = [word for word, holds in (("estimate", target.estimated), ("disturbed", target.disturbed)) if holds]
    verdict = ("passed" if target.passed else "missed") + (f" ({', '.join(caveats)})" if caveats else "")
    measured = f"{'≈ ' if target.estimated else ''}{value}{spread}"
    return target.what, target.where, measured, f"{'≤' if target.at_most else '≥'} {target.limit:g}", verdict


def show_targets(targets: Sequence[PerformanceTarget], console: Console) -> None:
    """Print the table of targets, if there are any."""
    from rich.table import Table

    if not targets:
        return
    table = Table(*TARGET_COLUMNS, title="Targets", title_justify="left", title_style="bold")
    for target in targets:
        *cells, verdict = target_row(target)
        table.add_row(*cells, f"[{'green' if target.passed else 'red'}]{verdict}")
    console.print(table)


def busy_note(machine: Machine) -> list[str]:
    """Return a note that the machine was busy, or nothing if it was not."""
    load, cores = machine["load"], machine["cores"]
    note = f"The machine was busy (load {load} on {cores} cores) when the run began: the times may be off."
    return [note] if busy(machine) else []


def json_document(
    benchmark: str, command: str, rules: Mapping[str, str], bench: Any, targets: Sequence[PerformanceTarget]
) -> str:
    """Return all of the dataclass ``bench`` as JSON, down to the seconds of each call."""
    document = {
        "benchmark": benchmark,
        "command": command,
        "rules": rules,
        **asdict(bench),
        "bars": [{**asdict(target), "passed": target.passed} for target in targets],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def write_documents(out: Path, documents: Mapping[str, str]) -> list[Path]:
    """Write each text to the file of its name in the folder ``out`` and return the paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / name for name in documents]
    for path, text in zip(paths, documents.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths
