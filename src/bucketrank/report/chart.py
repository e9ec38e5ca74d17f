"""Line charts as SVG: drawn here, so that they are seen without scripts; a script adds the hover."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bucketrank.report.markup import Html, data, join, tag

WIDTH, HEIGHT = 400, 236
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34  # margins of the plot
COLOURS = 8  # of runs, in page.css; then they begin again
MOST_POINTS = 240  # of a line: more than the pixels can show

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A line of a chart. ``colour`` is one of COLOURS, counted from 0; ``notes`` are shown with each point."""

    name: str
    points: Points
    colour: int = 0
    run: int | None = None  # whose line it is, for the legend
    dashed: bool = False
    notes: list[str] = field(default_factory=list)
    mark: int | None = None  # the point that is marked
    mark_name: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart with its title, and what its axes are."""

    title: str
    x: str
    y: str
    lines: list[Line]
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    digits: int = 4  # of the values that the hover shows


def draw(chart: Chart) -> Html:
    """The chart as a figure, with its numbers for the script."""
    points = [point for line in chart.lines for point in line.points]
    x_low, x_high = chart.x_range or _range([x for x, _ in points], zero=False)
    y_low, y_high = chart.y_range or _range([y for _, y in points], zero=True)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + (point[0] - x_low) / (x_high - x_low) * (right - LEFT)
        y = bottom - (point[1] - y_low) / (y_high - y_low) * (bottom - TOP)
        return round(x, 1), round(y, 1)

    parts: list[Html] = []
    for value in ticks(y_low, y_high, most=5):
        _, y = place((x_low, value))
        parts += [
            tag("line", x1=LEFT, x2=right, y1=y, y2=y, class_="grid"),
            tag("text", short(value), x=LEFT - 6, y=y + 4, class_="tick", text_anchor="end"),
        ]
    for value in ticks(x_low, x_high, most=6):
        x, _ = place((value, y_low))
        parts.append(tag("text", short(value), x=x, y=bottom + 16, class_="tick", text_anchor="middle"))
    parts.append(tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(tag("text", chart.x, x=right, y=HEIGHT - 4, class_="tick", text_anchor="end"))
    parts += [_line(line, [place(point) for point in line.points]) for line in chart.lines]
    parts.append(tag("g", class_="hover"))
    drawing = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        tabindex="0",
        aria_label=f"{chart.title}: {chart.y} over {chart.x}. {_in_words(chart)}",
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


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> Points:
    """At most so many points: each the mean of neighbours.

    >>> thinned([(1, 4.0), (2, 6.0), (3, 1.0), (4, 3.0)], most=2)
    [(1.5, 5.0), (3.5, 2.0)]
    """
    if len(points) <= most:
        return [(float(x), y) for x, y in points]
    edges = [round(part * len(points) / most) for part in range(most + 1)]
    groups = [points[first:last] for first, last in pairwise(edges)]
    return [(sum(x for x, _ in each) / len(each), sum(y for _, y in each) / len(each)) for each in groups]


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """Round numbers between both.

    >>> ticks(0, 1, most=5)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    span = high - low
    for exponent in range(math.floor(math.log10(span)) - 1, math.floor(math.log10(span)) + 2):
        for step in (1.0, 2.0, 2.5, 5.0):
            width = step * 10.0**exponent
            first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
            if last - first + 1 <= most:
                return [number * width for number in range(first, last + 1)]
    return [low, high]


def short(value: float) -> str:
    """A number for an axis.

    >>> short(20000.0), short(0.25), short(0.30000000000000004)
    ('20k', '0.25', '0.3')
    """
    return f"{value / 1000:g}k" if abs(value) >= 10000 else f"{round(value, 10):g}"


def _range(values: Sequence[float], *, zero: bool) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if zero:
        low, high = min(low, 0.0), high + 0.05 * abs(high)
    return (low, high) if high > low else (low, low + 1)


def _line(line: Line, places: Points) -> Html:
    path = "M" + "L".join(f"{x:g},{y:g}" for x, y in places) if places else ""
    parts = [tag("path", d=path, class_="line dashed" if line.dashed else "line")]
    if len(places) <= 12:
        parts += [tag("circle", cx=x, cy=y, r=2.2, class_="dot") for x, y in places]
    if line.mark is not None:
        x, y = places[line.mark]
        parts.append(tag("circle", tag("title", line.mark_name), cx=x, cy=y, r=5, class_="mark"))
    return tag("g", *parts, class_=f"series c{line.colour}", data_run=line.run)


def _in_words(chart: Chart) -> str:
    words = [f"{line.name} ends at {line.points[-1][1]:.{chart.digits}g}" for line in chart.lines if line.points]
    return "; ".join(words) + "." if words else "There are no numbers."


def _numbers(line: Line, digits: int) -> dict[str, Any]:
    return {
        "name": line.name,
        "run": line.run,
        "colour": line.colour,
        "x": [float(f"{x:.6g}") for x, _ in line.points],
        "y": [float(f"{y:.{digits + 1}g}") for _, y in line.points],
        "notes": line.notes,
    }


def grid(charts: Sequence[Html]) -> Html:
    """Charts side by side, as many as fit."""
    return tag("div", join(*charts), class_="charts")
