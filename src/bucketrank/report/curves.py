"""What a run learned over its steps: losses and AP of all runs together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from bucketrank.report.chart import COLOURS, Chart, Line, draw, grid, thinned
from bucketrank.report.folder import RunFolder
from bucketrank.report.markup import Html, tag
from bucketrank.report.tables import table

NOT_TERMS = ("step", "epoch", "loss", "lr", "seconds")
METRICS = ("AP", "AP50", "AP75")
MANY = 8  # terms, from which on they are folded away


def curves(runs: Sequence[RunFolder]) -> Html:
    """The charts, and a few numbers of each run."""
    terms = list(dict.fromkeys(name for run in runs for name in run.train.values if name not in NOT_TERMS))
    kinds = [kind for kind in ("boxes", "masks") if any(f"{kind}/AP" in run.validation.values for run in runs)]
    precision = _drawn(_precision(runs, kind, name) for kind in kinds for name in METRICS)
    loss = _drawn([_losses(runs, "loss", "all terms together")])
    parts = _drawn(_losses(runs, name, "a term of the loss") for name in terms)
    if not precision and not loss:
        return tag("p", "There are no curves: none of the folders has rows in train.csv or validation.csv.")
    if len(parts) < MANY:
        return tag("div", grid(precision), grid([*loss, *parts]), numbers(runs))
    folded = tag("details", tag("summary", f"The {len(parts)} terms of the loss"), grid(parts))
    return tag("div", grid([*precision, *loss]), folded, numbers(runs))


def _drawn(charts: Iterable[Chart | None]) -> list[Html]:
    return [draw(chart) for chart in charts if chart is not None]


def numbers(runs: Sequence[RunFolder]) -> Html:
    """Steps, learning rate and seconds of each run."""
    head = ["", "steps", "epochs", "highest learning rate", "last learning rate", "seconds a step (median)"]
    rows = []
    for run in runs:
        rates = [value for _, value in run.train.pairs("lr")]
        seconds = [value for _, value in run.train.pairs("seconds")]
        epochs = run.train.last().get("epoch", math.nan)
        rows.append(
            [
                run.name,
                f"{run.train.steps[-1]:,}" if run.train.steps else "-",
                f"{epochs:g}" if math.isfinite(epochs) else "-",
                f"{max(rates):.3g}" if rates else "-",
                f"{rates[-1]:.3g}" if rates else "-",
                f"{median(seconds):.3g}" if seconds else "-",
            ]
        )
    return table(head, rows, caption="Seconds a step include waiting for images, and whatever else the machine did.")


def _losses(runs: Sequence[RunFolder], name: str, about: str) -> Chart | None:
    lines = [
        Line(run.name, thinned(points), colour=number % COLOURS, run=number, dashed=number >= COLOURS)
        for number, run in enumerate(runs)
        if (points := run.train.pairs(name))
    ]
    return Chart(name, "step", about, lines, _steps(lines)) if lines else None


def _precision(runs: Sequence[RunFolder], kind: str, name: str) -> Chart | None:
    lines = []
    for number, run in enumerate(runs):
        points = [(float(step), 100 * value) for step, value in run.validation.pairs(f"{kind}/{name}")]
        if points:
            lines.append(Line(run.name, points, colour=number % COLOURS, run=number, dashed=number >= COLOURS))
    return (
        Chart(f"{name} of {kind}", "step", "per cent, on the validation set", lines, _steps(lines)) if lines else None
    )


def _steps(lines: Sequence[Line]) -> tuple[float, float]:
    """From 0, so that all charts of a run have the same steps under each other."""
    return 0.0, max(1.0, *(x for line in lines for x, _ in line.points))
