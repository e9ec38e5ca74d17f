"""Benchmark documents: Markdown tables, numbers with units, performance targets, and JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from benchmarks.timing import Spread
from bucketrank.errors import short_repr
from bucketrank.provenance import Machine, format_machine

if TYPE_CHECKING:
    from rich.console import Console

TIMES = "\N{MULTIPLICATION SIGN}"
TARGET_COLUMNS = ("", "where", "measured", "target", "")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table.

    >>> print(markdown_table(("a", "b"), [("1", "2")]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [head, ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_spread(
    seconds: Spread | None, estimate: float | None, *, spread: Literal["quartiles", "percent", "none"]
) -> str:
    """Format the median with its spread, or the estimate of a skipped contender.

    >>> format_spread(Spread(0.2, 0.1, 0.4), None, spread="percent"), format_spread(None, 3.0, spread="none")
    ('200 ms ±75 %', 'skipped, ≈ 3.00 s')
    """
    if seconds is None:
        return "n/a" if estimate is None else f"skipped, ≈ {format_seconds(estimate)}"
    if spread == "quartiles":
        return format_seconds(seconds.median, seconds.low, seconds.high)
    text = format_seconds(seconds.median)
    return f"{text} ±{50 * (seconds.high - seconds.low) / seconds.median:.0f} %" if spread == "percent" else text


def format_launches(launches: int | None, waits: int | None) -> str:
    """Format launches and device syncs; empty if they were not counted.

    >>> format_launches(15, 1)
    '15 / 1'
    """
    return "" if launches is None or waits is None else f"{launches:,} / {waits}"


def target_row(target: PerformanceTarget) -> tuple[str, str, str, str, str]:
    """Format one target in the order of ``TARGET_COLUMNS``; the last cell is the verdict."""
    value, low, high = (significant(x) for x in (target.value, target.low, target.high))
    spread = "" if value == low == high else f" [{low}, {high}]"
    caveats = [word for word, holds in (("estimate", target.estimated), ("disturbed", target.disturbed)) if holds]
    verdict = ("passed" if target.passed else "missed") + (f" ({', '.join(caveats)})" if caveats else "")
    measured = f"{'≈ ' if target.estimated else ''}{value}{spread}"
    return target.what, target.where, measured, f"{'≤' if target.at_most else '≥'} {target.limit:g}", verdict


def show_end(targets: Sequence[PerformanceTarget], notes: Sequence[str], machine: Machine, console: Console) -> None:
    """Print the targets, if any, the notes and the machine, after the result tables."""
    from rich.table import Table

    if targets:
        table = Table(*TARGET_COLUMNS, title="Targets", title_justify="left", title_style="bold")
        for target in targets:
            *cells, verdict = target_row(target)
            table.add_row(*cells, f"[{'green' if target.passed else 'red'}]{verdict}")
        console.print(table)
    for line in notes:
        console.print(f"· {line}", style="dim", highlight=False)
    console.print(format_machine(machine), style="dim", highlight=False)


def markdown_targets(targets: Sequence[PerformanceTarget]) -> list[str]:
    """Format the section with the targets, if any."""
    return ["## Targets", markdown_table(TARGET_COLUMNS, list(map(target_row, targets)))] if targets else []


def markdown_end(rules: Mapping[str, str], notes: Sequence[str]) -> list[str]:
    """Format the last sections of a document: measurement rules and notes."""
    how = "\n".join(f"- {name}: {rule}." for name, rule in rules.items())
    return ["## How it was measured", how, "## Notes", "\n".join(f"- {line}" for line in notes)]


def busy(machine: Machine) -> bool:
    """Return whether other programs used the processor, which may have disturbed the times."""
    return machine["load"] is not None and machine["load"] > 0.5 * machine["cores"]


def busy_note(machine: Machine) -> list[str]:
    """Write a note if the machine was busy."""
    load, cores = machine["load"], machine["cores"]
    note = f"The machine was busy (load {load} on {cores} cores) when the run began: the times may be off."
    return [note] if busy(machine) else []


def json_document(
    benchmark: str, command: str, rules: Mapping[str, str], bench: Any, targets: Sequence[PerformanceTarget]
) -> str:
    """Format all results in ``bench`` as JSON, down to the seconds of each call."""
    document = {
        "benchmark": benchmark,
        "command": command,
        "rules": rules,
        **asdict(bench),
        "bars": [{**asdict(target), "passed": target.passed} for target in targets],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def write_documents(out: Path, documents: Mapping[str, str]) -> list[Path]:
    """Write each text to its file in the folder ``out`` and return the paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / name for name in documents]
    for path, text in zip(paths, documents.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


@dataclass(frozen=True)
class PerformanceTarget:
    """A measured value with its quartiles ``low`` and ``high``, and its limit.

    ``estimated``: the value depends on an extrapolated time. ``disturbed``: other programs ran during the measurement.
    """

    what: str
    where: str
    value: float
    low: float
    high: float
    limit: float
    at_most: bool
    estimated: bool = False
    disturbed: bool = False

    @property
    def passed(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def performance_target(what: str, where: str, spread: Spread, limit: float, **flags: bool) -> PerformanceTarget:
    """Build the target for a measured ``spread``; ``flags`` are the boolean fields."""
    return PerformanceTarget(what, where, spread.median, spread.low, spread.high, limit, **flags)


UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "K"))
DURATIONS = ((60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def format_size(n: int) -> str:
    """Format a number of logits with a unit.

    >>> format_size(10_000), format_size(1_500_000), format_size(640)
    ('10K', '1.5M', '640')
    """
    return next((f"{n / unit:.12g}{letter}" for unit, letter in UNITS if n >= unit), str(n))


def parse_size(text: str) -> int:
    """Parse a number of logits in the form of :func:`format_size`.

    >>> parse_size("10K"), parse_size("1.5M"), parse_size("640")
    (10000, 1500000, 640)
    """
    for unit, letter in UNITS:
        if text.strip().upper().endswith(letter):
            return round(float(text.strip()[:-1]) * unit)
    return int(text)


def significant(x: float) -> str:
    """Format ``x`` with three significant digits and without an exponent.

    >>> significant(0.01234), significant(1.0), significant(98.7654), significant(1234.5)
    ('0.0123', '1.00', '98.8', '1,230')
    """
    x = float(f"{x:.2e}")
    return f"{x:,.{max(0, 2 - math.floor(math.log10(abs(x))))}f}" if x else "0"


def format_seconds(seconds: float, *others: float) -> str:
    """Format a duration with a unit, followed by ``others`` in brackets in the same unit.

    >>> format_seconds(0.0456), format_seconds(400), format_seconds(0.0009999), format_seconds(2.5, 2.4, 2.6)
    ('45.6 ms', '6.67 min', '1.00 ms', '2.50 s [2.40, 2.60]')
    """
    seconds = float(f"{seconds:.2e}")  # 999.9 µs are 1 ms
    unit, name = next((u for u in DURATIONS if seconds >= u[0]), DURATIONS[-1])
    # 84 s is easier to read than 1.4 min.
    unit, name = (1.0, "s") if name == "min" and seconds < 120 else (unit, name)
    brackets = f" [{', '.join(significant(other / unit) for other in others)}]" if others else ""
    return f"{significant(seconds / unit)} {name}{brackets}"


def format_bytes(n: int) -> str:
    """Format an amount of memory with a unit.

    >>> format_bytes(123_456), format_bytes(12_345_678)
    ('123 KB', '12.3 MB')
    """
    return next((f"{significant(n / unit)} {letter}B" for unit, letter in UNITS if n >= unit), f"{n} B")


def format_count(n: int) -> str:
    """Format a number of operations with a unit.

    >>> format_count(76_000_000), format_count(900)
    ('76.0M', '900')
    """
    return next((f"{significant(n / unit)}{letter}" for unit, letter in UNITS if n >= unit), str(n))


BENCHMARKS = ("losses", "detectors")

BenchT = TypeVar("BenchT")


class BenchFileError(ValueError):
    """A file does not hold the results of a benchmark; the message names the file and the problem."""


def read_document(path: Path) -> dict[str, Any]:
    """Read a document that ``losses`` or ``detectors`` wrote."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchFileError(f"{path}: expected the JSON of a benchmark, got {error}") from error
    except RecursionError as error:
        raise BenchFileError(f"{path}: expected the JSON of a benchmark, got values nested too deeply") from error
    if not isinstance(document, dict) or document.get("benchmark") not in BENCHMARKS:
        known = " or ".join(BENCHMARKS)
        raise BenchFileError(f"{path}: expected the results of a benchmark of {known}, got other content")
    return document


def restore_bench(bench: type[BenchT], document: dict[str, Any]) -> BenchT:
    """Restore the dataclass that :func:`json_document` wrote."""
    try:
        restored: BenchT = _restore(bench, document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BenchFileError(f"expected the results of {bench.__name__}, got wrong fields: {error!r}") from error
    return restored


def _restore(annotation: Any, value: Any) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return None if value is None else _restore(arguments[0], value)
    if origin is list:
        return [_restore(arguments[0], each) for each in value]
    if origin is tuple:
        return tuple(_restore(arguments[0], each) for each in value)
    if origin is dict:
        return {_restore(arguments[0], key): _restore(arguments[1], each) for key, each in value.items()}
    if is_dataclass(annotation) and isinstance(annotation, type):
        return _restore_dataclass(annotation, value)
    if annotation is str and not isinstance(value, str):
        raise TypeError(f"expected a text, got {short_repr(value)}")
    return annotation(value) if annotation in (int, float) else value


def _restore_dataclass(annotation: type, values: dict[str, Any]) -> Any:
    hints = get_type_hints(annotation)
    # Bypass the constructor: the settings may name a device that this machine does not have.
    restored: Any = object.__new__(annotation)
    for field in fields(annotation):
        if field.name in values:
            value = _restore(hints[field.name], values[field.name])
        elif field.default is not MISSING:  # added to the results after the file was written
            value = field.default
        elif field.default_factory is not MISSING:
            value = field.default_factory()
        else:
            raise KeyError(field.name)
        object.__setattr__(restored, field.name, value)
    return restored
