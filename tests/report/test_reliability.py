"""The reliability diagram and the calibration errors on the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bucketrank.evaluation import Evaluator
from bucketrank.evaluation.calibration import Calibration
from bucketrank.report.measurements import Measurement
from bucketrank.report.page import ReportedRun, render_page
from bucketrank.report.ranked_lists import rank_detections, trained_scores
from bucketrank.report.sections import reliability
from bucketrank.settings import loss_settings
from tests.report.synthetic_reports import synthetic_run

CALIBRATION = Calibration("platt", "match", (2.0,), (1.0,), (0.2, 0.01), (0.1, 0.05), 100, 5000, 700, 0.4)


@pytest.fixture
def run(shapes: Path) -> ReportedRun:
    return synthetic_run(shapes, "one")


@pytest.fixture
def measurement(run: ReportedRun) -> Measurement:
    assert run.measurement is not None
    return run.measurement


def test_every_bin_is_a_point_with_its_number_of_detections(measurement: Measurement) -> None:
    bins = measurement.errors.reliability
    assert len(bins.counts) > 2
    html = reliability(measurement, colour=3)
    for score, outcome, count in zip(bins.scores, bins.outcomes, bins.counts, strict=True):
        assert f"{count:,} detections" in html
        assert f"{float(f'{score:.6g}')}"[:6] in html
        assert f"{float(f'{outcome:.4g}')}"[:5] in html
    assert html.count('class="line dashed"') == 1, "the diagonal"
    assert "Scores are not calibrated" in html


def test_the_page_has_errors_and_says_what_scores_are(run: ReportedRun, measurement: Measurement) -> None:
    page = render_page([run])
    assert f"<td>{measurement.errors.d_ece:.4f}</td><td>{measurement.errors.la_ece:.4f}</td>" in page
    assert "<td>not calibrated</td>" in page
    calibrated = replace(measurement, meta=replace(measurement.meta, calibration=CALIBRATION))
    page = render_page([replace(run, measurement=calibrated)])
    assert "<td>calibrated</td>" in page
    assert (
        "calibrated to the probability of a match at IoU 0.5, on 100 images: the calibration error (D-ECE) was " in page
    )


def test_gradients_are_those_of_the_logits_before_calibration(measurement: Measurement) -> None:
    image = next(each for each in measurement.best if each.detections)
    raw = [each.score for each in image.detections]
    columns = np.array([measurement.meta.category_ids.index(each.category) for each in image.detections])
    shown = CALIBRATION.score_map(np.array(raw), columns)
    calibrated = replace(
        image, detections=[replace(d, score=float(s)) for d, s in zip(image.detections, shown, strict=True)]
    )
    meta = replace(measurement.meta, calibration=CALIBRATION)
    assert trained_scores(calibrated, meta) == pytest.approx(raw, rel=1e-4)
    assert trained_scores(image, measurement.meta) == raw
    settings, names = loss_settings("rs"), measurement.class_names
    expected = rank_detections(image, names, settings)
    ranked = rank_detections(calibrated, names, settings, scores=trained_scores(calibrated, meta))
    assert [e.gradient for e in ranked.entries] == pytest.approx([e.gradient for e in expected.entries], abs=1e-6)
    temperature = replace(CALIBRATION, method="temperature")
    for calibration, undone in ((CALIBRATION, True), (temperature, False)):  # a temperature stays in the scores
        meta = replace(measurement.meta, calibration=calibration)
        other = replace(synthetic_run(measurement.data, "one"), measurement=replace(measurement, meta=meta))
        assert ("log-odds are from before calibration" in render_page([other])) == undone


def test_without_detections(measurement: Measurement) -> None:
    nothing = Evaluator(measurement.split).calibration_errors()
    assert "No diagram" in reliability(replace(measurement, errors=nothing), colour=0)
