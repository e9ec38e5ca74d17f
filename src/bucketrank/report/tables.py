"""Tables: the settings in which runs differ, COCO's numbers, AP by class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bucketrank.report.folder import RunFolder
from bucketrank.report.markup import Html, tag
from bucketrank.training.recipe import differences


def table(head: Sequence[str], rows: Sequence[Sequence[str | Html]], *, caption: str = "", tall: bool = False) -> Html:
    """A table in a box of its own that scrolls sideways (and, if it may be long, down); a row opens with its name."""
    top = tag("tr", *(tag("th", each, scope="col") if each else tag("td") for each in head))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    inner = tag("table", tag("thead", top), tag("tbody", *body))
    box = tag(
        "div", inner, class_="wide tall" if tall else "wide", tabindex="0", role="region", aria_label=caption or "table"
    )
    return tag("div", box, tag("p", caption, class_="note") if caption else "", class_="table")


def settings(runs: Sequence[RunFolder]) -> Html:
    """Those in which the runs differ from the first."""
    if len(runs) < 2:
        return Html("")
    keys = list(dict.fromkeys(key for run in runs[1:] for key in differences(runs[0].recipe, run.recipe)))
    if not keys:
        return tag("p", "All settings of the runs are the same.")
    flat = [run.recipe.flat() for run in runs]
    rows = [[key, *(_value(values, key) for values in flat)] for key in keys]
    caption = "The settings in which the runs differ; - where a detector has no such setting."
    return table(["setting", *(run.name for run in runs)], rows, caption=caption, tall=True)


def metrics(names: Sequence[str], numbers: Sequence[Mapping[str, float]], *, compare: bool, caption: str) -> Html:
    """COCO's (or LVIS's) numbers, a row for each run; the best of a column in bold if they can be compared."""
    columns = list(dict.fromkeys(key for each in numbers for key in each))
    best = {key: _best([each.get(key, math.nan) for each in numbers]) for key in columns}
    rows = []
    for name, each in zip(names, numbers, strict=True):
        cells = [_percent(each.get(key, math.nan), best=best[key] if compare else None) for key in columns]
        rows.append([name, *cells])
    return table(["run", *columns], rows, caption=caption)


def classes(names: Sequence[str], numbers: Sequence[Mapping[str, float]], *, compare: bool, caption: str) -> Html:
    """AP by class, a column for each run."""
    rows = []
    for key in dict.fromkeys(key for each in numbers for key in each):
        values = [each.get(key, math.nan) for each in numbers]
        best = _best(values) if compare else None
        rows.append([key, *(_percent(value, best=best) for value in values)])
    return table(["class", *names], rows, caption=caption, tall=True)


def _best(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return max(known) if len(known) > 1 else None


def _percent(value: float, *, best: float | None) -> Html:
    if not math.isfinite(value):
        return Html("-")
    text = f"{100 * value:.1f}"
    # By what is shown: two that look the same are both the best.
    return tag("b", text) if best is not None and text == f"{100 * best:.1f}" else Html(text)


def _value(values: Mapping[str, Any], key: str) -> str:
    """A setting in words.

    >>> _value({"schedule.factors": {"offsets": 0.1}}, "schedule.factors"), _value({"init": None}, "init")
    ('offsets 0.1', 'none')
    """
    value = values.get(key, "-")
    if isinstance(value, dict):
        value = [f"{name} {each}" for name, each in value.items()]
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
