"""Parts of a benchmark's documents: Markdown tables, times, performance targets, notes and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bucketrank.bench.performance_target import PerformanceTarget
from bucketrank.bench.timing import Spread
from bucketrank.bench.units import seconds_in_words, significant
from bucketrank.provenance.machine import Machine, busy, in_words

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


def spread_in_words(
    seconds: Spread | None, estimate: float | None, *, spread: Literal["quartiles", "percent", "none"]
) -> str:
    """Return the median with its spread, or the estimate of a skipped contender.

    >>> spread_in_words(Spread(0.2, 0.1, 0.4), None, spread="percent"), spread_in_words(None, 3.0, spread="none")
    ('200 ms ±75 %', 'skipped, ≈ 3.00 s')
    """
    if seconds is None:
        return "n/a" if estimate is None else f"skipped, ≈ {seconds_in_words(estimate)}"
    if spread == "quartiles":
        return seconds_in_words(seconds.median, seconds.low, seconds.high)
    text = seconds_in_words(seconds.median)
    return f"{text} ±{50 * (seconds.high - seconds.low) / seconds.median:.0f} %" if spread == "percent" else text


def launches_in_words(launches: int | None, waits: int | None) -> str:
    """Return launches and host waits, or nothing if they were not counted.

    >>> launches_in_words(15, 1)
    '15 / 1'
    """
    return "" if launches is None or waits is None else f"{launches:,} / {waits}"


def target_row(target: PerformanceTarget) -> tuple[str, str, str, str, str]:
    """Return the cells of one target in the order of ``TARGET_COLUMNS``; the last is the verdict."""
    value, low, high = (significant(x) for x in (target.value, target.low, target.high))
    spread = "" if value == low == high else f" [{low}, {high}]"
    caveats = [word for word, holds in (("estimate", target.estimated), ("disturbed", target.disturbed)) if holds]
    verdict = ("passed" if target.passed else "missed") + (f" ({', '.join(caveats)})" if caveats else "")
    measured = f"{'≈ ' if target.estimated else ''}{value}{spread}"
    return target.what, target.where, measured, f"{'≤' if target.at_most else '≥'} {target.limit:g}", verdict


def show_end(targets: Sequence[PerformanceTarget], notes: Sequence[str], machine: Machine, console: Console) -> None:
    """Print what follows the tables of results: the table of targets, if there are any, the notes and the machine."""
    from rich.table import Table

    if targets:
        table = Table(*TARGET_COLUMNS, title="Targets", title_justify="left", title_style="bold")
        for target in targets:
            *cells, verdict = target_row(target)
            table.add_row(*cells, f"[{'green' if target.passed else 'red'}]{verdict}")
        console.print(table)
    for line in notes:
        console.print(f"· {line}", style="dim", highlight=False)
    console.print(in_words(machine), style="dim", highlight=False)


def markdown_targets(targets: Sequence[PerformanceTarget]) -> list[str]:
    """Return the section of the targets, or nothing if there are none."""
    return ["## Targets", markdown_table(TARGET_COLUMNS, list(map(target_row, targets)))] if targets else []


def markdown_end(rules: Mapping[str, str], notes: Sequence[str]) -> list[str]:
    """Return the last sections of a document: the rules of the measurement, and the notes."""
    how = "\n".join(f"- {name}: {rule}." for name, rule in rules.items())
    return ["## How it was measured", how, "## Notes", "\n".join(f"- {line}" for line in notes)]


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
