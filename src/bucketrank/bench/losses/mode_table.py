"""One cell of the benchmark at a glance: a row per contender, a column per mode, launches and memory."""

from __future__ import annotations

from typing import get_args

from bucketrank.bench.bench_documents import TIMES, launches_in_words, markdown_table
from bucketrank.bench.flags import device_type
from bucketrank.bench.losses.loss_contenders import BASELINES, LOSSES, METHODS, TITLES
from bucketrank.bench.losses.loss_modes import Mode
from bucketrank.bench.losses.loss_results import LossBench, LossResult
from bucketrank.bench.units import bytes_in_words, seconds_in_words, significant, size_in_words

MODES: tuple[Mode, ...] = get_args(Mode)
USUAL_PERCENT = 1.0  # of positives; the table shows the nearest percentage that was measured


def mode_tables(bench: LossBench) -> list[str]:
    """Return headings and Markdown tables for the largest size; nothing if all results are eager."""
    if {result.mode for result in bench.results} <= {"eager"}:
        return []
    size = max(bench.settings.sizes)
    percent = min(bench.settings.percent, key=lambda each: abs(each - USUAL_PERCENT))
    parts = []
    for loss, title in LOSSES.items():
        parts += [
            f"## {title} loss at {size_in_words(size)} logits, {percent:g} % positives",
            "Median · ratio to eager focal loss; launches / host waits and peak extra memory of an eager step.",
            markdown_table(("", *MODES, "launches / waits", "memory"), _rows(bench, loss, size, percent)),
        ]
    return parts


def _rows(bench: LossBench, loss: str, size: int, percent: float) -> list[list[str]]:
    rows = []
    for name in (*METHODS, *BASELINES):
        results = [bench.find(name, loss, size, percent, mode) for mode in MODES]
        eager = results[0]
        if eager is not None:
            memory = "" if eager.extra_bytes is None else bytes_in_words(eager.extra_bytes)
            on_cpu = device_type(bench.settings.device) == "cpu"
            costs = ["" if on_cpu else launches_in_words(eager.launches, eager.waits), memory]
            rows.append([TITLES[name], *(_time(result) for result in results), *costs])
    return rows


def _time(result: LossResult | None) -> str:
    if result is None:
        return ""
    if result.seconds is None:
        return "skipped"
    ratio = "" if result.to_focal is None else f" · {significant(result.to_focal.median)}{TIMES}"
    return seconds_in_words(result.seconds.median) + ratio
