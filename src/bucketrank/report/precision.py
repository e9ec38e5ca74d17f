"""Precision and recall of a run over its scores, with the threshold that is stored with the weights."""

from __future__ import annotations

import numpy as np

from bucketrank.evaluation.threshold import Curve
from bucketrank.report.chart import MOST_POINTS, Chart, Line, draw, grid
from bucketrank.report.markup import Html, tag
from bucketrank.report.measure import Measured


def precision_recall(measured: Measured, *, colour: int) -> Html:
    """A chart for boxes and, where there are masks, one for those."""
    threshold = measured.meta.threshold
    charts = []
    for kind, by_iou in measured.precision_recall.items():
        lines = [
            line
            for number, (iou, curve) in enumerate(by_iou.items())
            if (line := _line(curve, f"IoU {iou:g}", threshold, colour=colour, dashed=number > 0)) is not None
        ]
        if lines:
            title = f"precision of {kind}"
            chart = Chart(title, "recall", "IoU 0.5 solid, 0.75 dashed", lines, (0, 1), (0, 1), digits=3)
            charts.append(draw(chart))
    if not charts:
        return tag("p", "There are no objects in these images, or no detections, so there is no curve.")
    told = (
        f"The ring is the stored threshold, a score of {threshold:.4g}: that of the best F1 at IoU 0.5 in training."
        if threshold > 0
        else "No threshold is stored with these weights: no detection was right when one was to be chosen."
    )
    return tag("div", grid(charts), tag("p", f"All classes together. {told}", class_="note"))


def _line(curve: Curve, name: str, threshold: float, *, colour: int, dashed: bool) -> Line | None:
    if not len(curve.scores) or np.isnan(curve.recall).all():
        return None
    above = int((curve.scores >= threshold).sum()) - 1  # the last that is shown
    chosen = set(np.searchsorted(curve.recall, np.linspace(0, curve.recall[-1], MOST_POINTS)).tolist())
    chosen |= {0, max(above, 0)}
    places = sorted(place for place in chosen if place < len(curve.scores))
    marked = places.index(above) if threshold > 0 and above >= 0 else None
    return Line(
        name,
        [(float(curve.recall[place]), float(curve.precision[place])) for place in places],
        colour=colour,
        dashed=dashed,
        notes=[f"score {curve.scores[place]:.3g}" for place in places],
        mark=marked,
        mark_name=f"the stored threshold, {threshold:.4g}",
    )
