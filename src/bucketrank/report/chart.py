"""HTML elements and SVG line charts.

All text that is not :class:`Html` is escaped, so class names may contain any characters. Charts are complete without
scripts; a script adds the values at the pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any

Points = list[tuple[float, float]]

EMPTY = frozenset({"br", "circle", "image", "input", "line", "path", "rect", "use"})  # elements without content
WIDTH, HEIGHT = 400, 236
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34  # plot margins
COLOURS = 8  # number of line colours in page.css; further runs repeat them, dashed
MAX_POINTS = 240  # per line; the charts are too small to show more


class Html(str):
    """Text that is already markup and must not be escaped."""

    __slots__ = ()


def tag(name: str, *content: str | Html, **attributes: Any) -> Html:
    """Build an element; an attribute that is None or False is omitted, one that is True has no value.

    ``class_`` stands for ``class``; other underscores in names become hyphens.

    >>> tag("td", "1 < 2", class_="number", data_run=0)
    '<td class="number" data-run="0">1 &lt; 2</td>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.removesuffix("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escape(_text(value))}"')
    inner = join(*content)
    if name in EMPTY and not inner:
        return Html(f"<{' '.join(words)}/>")
    return Html(f"<{' '.join(words)}>{inner}</{name}>")


def join(*parts: str | Html) -> Html:
    """Concatenate the parts; escape plain text."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def data(content: Any, **attributes: Any) -> Html:
    """Build a script element with JSON for the page's scripts; no string in it can close the element."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json", **attributes)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str | Html]],
    *,
    caption: str = "",
    tall: bool = False,
    text: bool = False,
) -> Html:
    """Build a table that scrolls sideways and, if ``tall``, down; the first cell of a row is its header.

    Cells are numbers, set to the right, unless ``text``.
    """
    top = tag("tr", *(tag("th", title, scope="col") if title else tag("td") for title in head))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    inner = tag("table", tag("thead", top), tag("tbody", *body), class_="text" if text else None)
    box = tag(
        "div", inner, class_="wide tall" if tall else "wide", tabindex="0", role="region", aria_label=caption or "table"
    )
    return tag("div", box, tag("p", caption, class_="note") if caption else "", class_="table")


def control(*content: str | Html) -> Html:
    """Label an input element."""
    return tag("label", *content, class_="control")


def keys(texts: Mapping[str, str]) -> Html:
    """Explain marks: one text for each class of ``key`` in page.css."""
    entries = [tag("span", tag("span", class_=f"key {name}"), text, class_="entry") for name, text in texts.items()]
    return tag("p", *entries, class_="keys")


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class ChartLine:
    """A chart line; ``notes``, if any, has one text per point."""

    name: str
    points: Points
    colour: int = 0  # index from 0 to COLOURS - 1
    run: int | None = None  # index of the run that the legend shows and hides
    dashed: bool = False
    notes: list[str] = field(default_factory=list)
    mark: int | None = None  # index of the point to mark
    mark_name: str = ""


@dataclass(frozen=True)
class Chart:
    """The title, axes and lines of a chart."""

    title: str
    x: str  # axis label
    y: str
    lines: list[ChartLine]
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    digits: int = 4  # significant digits of the values shown at the pointer


def draw_chart(chart: Chart) -> Html:
    """Draw a chart as a figure, with its numbers as JSON for the script."""
    points = [point for line in chart.lines for point in line.points]
    x_low, x_high = chart.x_range or _range([x for x, _ in points], zero=False)
    y_low, y_high = chart.y_range or _range([y for _, y in points], zero=True)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def to_pixels(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + (point[0] - x_low) / (x_high - x_low) * (right - LEFT)
        y = bottom - (point[1] - y_low) / (y_high - y_low) * (bottom - TOP)
        return round(x, 1), round(y, 1)

    parts: list[Html] = []
    for value in ticks(y_low, y_high, max_count=5):
        _, y = to_pixels((x_low, value))
        parts += [
            tag("line", x1=LEFT, x2=right, y1=y, y2=y, class_="grid"),
            tag("text", tick_label(value), x=LEFT - 6, y=y + 4, class_="tick", text_anchor="end"),
        ]
    for value in ticks(x_low, x_high, max_count=6):
        x, _ = to_pixels((value, y_low))
        parts.append(tag("text", tick_label(value), x=x, y=bottom + 16, class_="tick", text_anchor="middle"))
    parts.append(tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(tag("text", chart.x, x=right, y=HEIGHT - 4, class_="tick", text_anchor="end"))
    parts += [_line(line, [to_pixels(point) for point in line.points]) for line in chart.lines]
    parts.append(tag("g", class_="hover"))
    drawing = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        tabindex="0",
        aria_label=f"{chart.title}: {chart.y} over {chart.x}. {_describe_ends(chart)}",
    )
    numbers = {
        "plot": [LEFT, TOP, right, bottom],
        "range": [x_low, x_high, y_low, y_high],
        "x": chart.x,
        "digits": chart.digits,
        "lines": [_numbers(line, chart.digits) for line in chart.lines],
    }
    caption = tag("figcaption", chart.title, tag("span", chart.y, class_="unit") if chart.y != chart.title else "")
    return tag("figure", caption, drawing, data(numbers), class_="chart")


def thinned(points: Sequence[tuple[float, float]], max_points: int = MAX_POINTS) -> Points:
    """Reduce a line to at most ``max_points``, each the mean of neighbouring points.

    >>> thinned([(1, 4.0), (2, 6.0), (3, 1.0), (4, 3.0)], max_points=2)
    [(1.5, 5.0), (3.5, 2.0)]
    """
    if len(points) <= max_points:
        return [(float(x), y) for x, y in points]
    edges = [round(number * len(points) / max_points) for number in range(max_points + 1)]
    groups = [points[first:last] for first, last in pairwise(edges)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def ticks(low: float, high: float, *, max_count: int) -> list[float]:
    """Choose at most ``max_count`` round numbers between ``low`` and ``high``.

    >>> ticks(0, 1, max_count=5)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    span = high - low
    for exponent in range(math.floor(math.log10(span)) - 1, math.floor(math.log10(span)) + 2):
        for step in (1.0, 2.0, 2.5, 5.0):
            width = step * 10.0**exponent
            first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
            if last - first + 1 <= max_count:
                return [number * width for number in range(first, last + 1)]
    return [low, high]


def tick_label(value: float) -> str:
    """Format a number on an axis.

    >>> tick_label(20000.0), tick_label(0.25), tick_label(0.30000000000000004)
    ('20k', '0.25', '0.3')
    """
    return f"{value / 1000:g}k" if abs(value) >= 10000 else f"{round(value, 10):g}"


def _range(values: Sequence[float], *, zero: bool) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if zero:
        low, high = min(low, 0.0), high + 0.05 * abs(high)
    return (low, high) if high > low else (low, low + 1)


def _line(line: ChartLine, pixels: Points) -> Html:
    path = "M" + "L".join(f"{x:g},{y:g}" for x, y in pixels) if pixels else ""
    parts = [tag("path", d=path, class_="line dashed" if line.dashed else "line")]
    if len(pixels) <= 12:
        parts += [tag("circle", cx=x, cy=y, r=2.2, class_="dot") for x, y in pixels]
    if line.mark is not None:
        x, y = pixels[line.mark]
        parts.append(tag("circle", tag("title", line.mark_name), cx=x, cy=y, r=5, class_="mark"))
    return tag("g", *parts, class_=f"series c{line.colour}", data_run=line.run)


def _describe_ends(chart: Chart) -> str:
    words = [f"{line.name} ends at {line.points[-1][1]:.{chart.digits}g}" for line in chart.lines if line.points]
    return "; ".join(words) + "." if words else "No data."


def _numbers(line: ChartLine, digits: int) -> dict[str, Any]:
    return {
        "name": line.name,
        "run": line.run,
        "colour": line.colour,
        "x": [float(f"{x:.6g}") for x, _ in line.points],
        "y": [float(f"{y:.{digits + 1}g}") for _, y in line.points],
        "notes": line.notes,
    }


def chart_grid(charts: Sequence[Html]) -> Html:
    """Arrange charts side by side, as many as fit."""
    return tag("div", *charts, class_="charts")
