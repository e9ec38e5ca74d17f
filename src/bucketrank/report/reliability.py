"""The reliability diagram of a run: how often detections of each score are right."""

from __future__ import annotations

import math

from bucketrank.deploy.scores_in_words import scores_in_words
from bucketrank.report.chart import Chart, ChartLine, chart_grid, draw_chart
from bucketrank.report.markup import Html, tag
from bucketrank.report.measurements import Measurement

COLUMNS = ("D-ECE", "LaECE", "scores")


def reliability(measurement: Measurement, *, colour: int) -> Html:
    """Return the diagram of the boxes; calibrated scores lie on its dashed diagonal."""
    bins = measurement.errors.reliability
    words = scores_in_words(measurement.meta)
    if not len(bins.counts):
        return tag("p", f"No diagram: there are no detections. {words}")
    lines = [
        ChartLine("calibrated", [(0.0, 0.0), (1.0, 1.0)], colour=colour, dashed=True),
        ChartLine(
            "this run",
            list(zip(bins.scores.tolist(), bins.outcomes.tolist(), strict=True)),
            colour=colour,
            notes=[f"{count:,} detections" for count in bins.counts.tolist()],
        ),
    ]
    chart = Chart("share of right detections", "score", "calibrated dashed", lines, (0, 1), (0, 1), digits=3)
    about = (
        "Each point is an interval of scores 0.04 wide; a detection is right if it matches an object of its class at "
        f"an IoU of 0.5. {words}"
    )
    return tag("div", chart_grid([draw_chart(chart)]), tag("p", about, class_="note"))


def calibration_row(measurement: Measurement) -> list[str]:
    """Return the cells of a run under COLUMNS."""
    errors = measurement.errors
    numbers = [f"{each:.4f}" if math.isfinite(each) else "-" for each in (errors.d_ece, errors.la_ece)]
    return [*numbers, "calibrated" if measurement.meta.calibration is not None else "not calibrated"]
