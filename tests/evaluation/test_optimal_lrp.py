"""Optimal LRP agrees with hand arithmetic and with a slow reading of its definition, with a matching of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bucketrank.evaluation import Evaluator, MatchedDetections, OptimalLRP
from tests.evaluation.random_detections import random_detections, random_document, random_lvis_document
from tests.evaluation.test_calibration_error import slow_matches


def matched(scores: list[float], ious: list[float], *, objects: int) -> MatchedDetections:
    """Return the detections of one class; an IoU of 0 marks one that matches nothing."""
    return MatchedDetections(
        scores=np.array(scores),
        labels=np.ones(len(scores), dtype=np.int64),
        ious=np.array(ious),
        right=np.array(ious) > 0,
        numbers=np.arange(len(scores)),
        objects=np.array([objects]),
    )


def test_by_hand() -> None:
    # The first two detections: (0.2 / 0.5 + 0.4 / 0.5 + 0 + 1) / 3. The third is wrong and raises the error.
    lrp = OptimalLRP.of(matched([0.9, 0.8, 0.7], [0.8, 0.6, 0.0], objects=3))
    assert lrp.localisation == pytest.approx(1.2 / 3)
    assert lrp.false_positives == 0
    assert lrp.false_negatives == pytest.approx(1 / 3)
    assert lrp.error == pytest.approx(2.2 / 3)


def test_perfect_and_useless_detections() -> None:
    assert OptimalLRP.of(matched([0.3, 0.2], [1.0, 1.0], objects=2)).error == 0
    useless = OptimalLRP.of(matched([0.9], [0.0], objects=2))  # the best threshold keeps nothing
    assert (useless.error, useless.false_positives, useless.false_negatives) == (1, 0, 1)
    assert OptimalLRP.of(matched([], [], objects=2)).error == 1
    assert math.isnan(OptimalLRP.of(matched([], [], objects=0)).error)


def test_detections_of_equal_score_are_kept_together() -> None:
    lrp = OptimalLRP.of(matched([0.5, 0.5], [1.0, 0.0], objects=1))
    assert lrp.error == pytest.approx(1 / 2)


def slow_optimal_lrp(outcomes: list[tuple[int, float, float, bool]], objects: dict[int, int]) -> float:
    """Try every score of a class as the threshold, and no detections at all."""
    errors = []
    for category, count in objects.items():
        if count == 0:
            continue
        own = [outcome for outcome in outcomes if outcome[0] == category]
        best = 1.0
        for threshold in {score for _, score, _, _ in own}:
            kept = [outcome for outcome in own if outcome[1] >= threshold]
            true_positives = [iou for _, _, iou, right in kept if right]
            false_positives, misses = len(kept) - len(true_positives), count - len(true_positives)
            total = sum((1 - iou) / 0.5 for iou in true_positives) + false_positives + misses
            best = min(best, total / (len(true_positives) + false_positives + misses))
        errors.append(best)
    return sum(errors) / len(errors)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lvis", [False, True], ids=["coco", "lvis"])
def test_random_detections(seed: int, lvis: bool) -> None:
    document = (random_lvis_document if lvis else random_document)(seed)
    evaluator = Evaluator(document, style="lvis" if lvis else "coco")
    detections = random_detections(document, seed + 100, masks=False)
    evaluator.add(list(detections), list(detections.values()))
    result = evaluator.result().columns
    parts = result["oLRP_loc"] + result["oLRP_fp"] + result["oLRP_fn"]
    assert result["oLRP"] == pytest.approx(parts)
    if not lvis:
        outcomes = slow_matches(document, evaluator.detections, 0.5)
        objects = {category["id"]: 0 for category in document["categories"]}
        for entry in document["annotations"]:
            objects[entry["category_id"]] += not entry["iscrowd"]
        assert result["oLRP"] == pytest.approx(slow_optimal_lrp(outcomes, objects))
