"""HTML tables: the settings that differ between runs, COCO's metrics, and AP per class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bucketrank.evaluation.optimal_lrp import ERRORS
from bucketrank.recipes.recipe import differences
from bucketrank.report.markup import Html, tag
from bucketrank.report.run_folder import RunFolder


def table(head: Sequence[str], rows: Sequence[Sequence[str | Html]], *, caption: str = "", tall: bool = False) -> Html:
    """Return a table that scrolls sideways and, if ``tall``, down; the first cell of a row is its header."""
    top = tag("tr", *(tag("th", title, scope="col") if title else tag("td") for title in head))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    inner = tag("table", tag("thead", top), tag("tbody", *body))
    box = tag(
        "div", inner, class_="wide tall" if tall else "wide", tabindex="0", role="region", aria_label=caption or "table"
    )
    return tag("div", box, tag("p", caption, class_="note") if caption else "", class_="table")


def settings_table(runs: Sequence[RunFolder]) -> Html:
    """Return a table of the settings in which a run differs from the first; nothing for a single run."""
    if len(runs) < 2:
        return Html("")
    keys = list(dict.fromkeys(key for run in runs[1:] for key in differences(runs[0].recipe, run.recipe)))
    if not keys:
        return tag("p", "All runs have the same settings.")
    flat = [run.recipe.flat() for run in runs]
    rows = [[key, *(_setting_text(values, key) for values in flat)] for key in keys]
    caption = "Settings that differ between the runs; - where a detector does not have the setting."
    return table(["setting", *(run.name for run in runs)], rows, caption=caption, tall=True)


def metrics_table(names: Sequence[str], metrics: Sequence[Mapping[str, float]], *, compare: bool, caption: str) -> Html:
    """Return AP, AR and oLRP with a row per run; ``compare`` puts the best of each column in bold."""
    columns = list(dict.fromkeys(key for each in metrics for key in each))
    best = {key: _best([each.get(key, math.nan) for each in metrics], lowest=key in ERRORS) for key in columns}
    rows = []
    for name, each in zip(names, metrics, strict=True):
        cells = [_percent(each.get(key, math.nan), best=best[key] if compare else None) for key in columns]
        rows.append([name, *cells])
    return table(["run", *columns], rows, caption=caption)


def class_table(names: Sequence[str], per_class: Sequence[Mapping[str, float]], *, compare: bool, caption: str) -> Html:
    """Return the AP per class with a column per run; ``compare`` puts the best of each row in bold."""
    rows = []
    for name in dict.fromkeys(name for each in per_class for name in each):
        values = [each.get(name, math.nan) for each in per_class]
        best = _best(values) if compare else None
        rows.append([name, *(_percent(value, best=best) for value in values)])
    return table(["class", *names], rows, caption=caption, tall=True)


def _best(values: Sequence[float], *, lowest: bool = False) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return (min if lowest else max)(finite) if len(finite) > 1 else None


def _percent(value: float, *, best: float | None) -> Html:
    if not math.isfinite(value):
        return Html("-")
    text = f"{100 * value:.1f}"
    # Compare the rounded texts: equal texts are both in bold.
    return tag("b", text) if best is not None and text == f"{100 * best:.1f}" else Html(text)


def _setting_text(values: Mapping[str, Any], key: str) -> str:
    """Return the value of a setting as text.

    >>> values = {"schedule.factors": {"offsets": 0.1}, "init": None}
    >>> _setting_text(values, "schedule.factors"), _setting_text(values, "init")
    ('offsets 0.1', 'none')
    """
    value = values.get(key, "-")
    if isinstance(value, dict):
        value = [f"{name} {each}" for name, each in value.items()]
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
