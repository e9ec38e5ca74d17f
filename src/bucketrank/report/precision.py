"""Precision-recall curves of a run, with a mark at the threshold stored with the weights."""

from __future__ import annotations

import numpy as np

from bucketrank.evaluation.threshold import Curve
from bucketrank.report.chart import MAX_POINTS, Chart, ChartLine, chart_grid, draw_chart
from bucketrank.report.markup import Html, tag
from bucketrank.report.measurements import Measurement


def precision_recall(measurement: Measurement, *, colour: int) -> Html:
    """Return a chart for boxes and, if the detector has masks, one for masks."""
    threshold = measurement.meta.threshold
    charts = []
    for iou_type, by_iou in measurement.precision_recall.items():
        lines = [
            line
            for number, (iou, curve) in enumerate(by_iou.items())
            if (line := _line(curve, f"IoU {iou:g}", threshold, colour=colour, dashed=number > 0)) is not None
        ]
        if lines:
            title = f"precision of {iou_type}"
            chart = Chart(title, "recall", "IoU 0.5 solid, 0.75 dashed", lines, (0, 1), (0, 1), digits=3)
            charts.append(draw_chart(chart))
    if not charts:
        return tag("p", "No curve: these images have no objects or no detections.")
    about_threshold = (
        f"The ring marks the stored threshold, {threshold:.4g}: the score of the best F1 at IoU 0.5 when the run was "
        "validated."
        if threshold > 0
        else "These weights have no stored threshold: no detection was correct when the run was validated."
    )
    return tag("div", chart_grid(charts), tag("p", f"All classes together. {about_threshold}", class_="note"))


def _line(curve: Curve, name: str, threshold: float, *, colour: int, dashed: bool) -> ChartLine | None:
    if not len(curve.scores) or np.isnan(curve.recall).all():
        return None
    last = int((curve.scores >= threshold).sum()) - 1  # the last point at or above the threshold
    chosen = set(np.searchsorted(curve.recall, np.linspace(0, curve.recall[-1], MAX_POINTS)).tolist())
    chosen |= {0, max(last, 0)}
    indices = sorted(index for index in chosen if index < len(curve.scores))
    marked = indices.index(last) if threshold > 0 and last >= 0 else None
    return ChartLine(
        name,
        [(float(curve.recall[index]), float(curve.precision[index])) for index in indices],
        colour=colour,
        dashed=dashed,
        notes=[f"score {curve.scores[index]:.3g}" for index in indices],
        mark=marked,
        mark_name=f"stored threshold, {threshold:.4g}",
    )
