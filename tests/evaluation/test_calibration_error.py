"""The calibration errors agree with a slow reading of their definitions, with a matching of its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bucketrank.evaluation import Evaluator, Reliability
from tests.evaluation.random_detections import random_detections, random_document, random_lvis_document

Entry = dict[str, Any]


def overlap(one: list[float], other: list[float], *, crowd: bool) -> float:
    (x, y, w, h), (u, v, p, q) = one, other
    common = max(0.0, min(x + w, u + p) - max(x, u)) * max(0.0, min(y + h, v + q) - max(y, v))
    return common / (w * h if crowd else w * h + p * q - common)


def slow_matches(document: Entry, records: list[Entry], least: float) -> list[tuple[int, float, float, bool]]:
    """Category, score, IoU and whether it is right for each detection that counts; one image and class at a time."""
    outcomes = []
    for image in document["images"]:
        for category in document["categories"]:
            here = {"image_id": image["id"], "category_id": category["id"]}
            objects = [entry for entry in document["annotations"] if here.items() <= entry.items()]
            taken: set[int] = set()
            for record in sorted((r for r in records if here.items() <= r.items()), key=lambda r: -r["score"]):
                best, best_iou = None, least
                for entry in objects:
                    iou = overlap(record["bbox"], entry["bbox"], crowd=False)
                    if not entry["iscrowd"] and entry["id"] not in taken and iou >= best_iou:
                        best, best_iou = entry, iou
                if best is not None:
                    taken.add(best["id"])
                    outcomes.append((category["id"], record["score"], best_iou, True))
                elif not any(
                    entry["iscrowd"] and overlap(record["bbox"], entry["bbox"], crowd=True) >= least
                    for entry in objects
                ):
                    outcomes.append((category["id"], record["score"], 0.0, False))
    return outcomes


def slow_error(pairs: list[tuple[float, float]], bins: int = 25) -> float:
    """The weighted mean of |mean score - mean outcome| over the bins (0, 1/25], (1/25, 2/25], ..."""
    total = 0.0
    for number in range(bins):
        inside = [pair for pair in pairs if number / bins < pair[0] <= (number + 1) / bins]
        if inside:
            scores, outcomes = zip(*inside, strict=True)
            total += len(inside) / len(pairs) * abs(sum(scores) / len(inside) - sum(outcomes) / len(inside))
    return total


@pytest.mark.parametrize("seed", range(3))
def test_errors_of_random_detections(seed: int) -> None:
    document = random_document(seed, images=12)
    evaluator = Evaluator(document)
    detections = random_detections(document, seed + 100, masks=False)
    evaluator.add(list(detections), list(detections.values()))
    errors = evaluator.calibration_errors()
    at_half = slow_matches(document, evaluator.detections, 0.5)
    assert sum(right for *_, right in at_half) > 10
    assert errors.d_ece == pytest.approx(slow_error([(score, float(right)) for _, score, _, right in at_half]))
    assert int(errors.reliability.counts.sum()) == len(at_half)
    overlapping = slow_matches(document, evaluator.detections, 1e-9)
    of_classes = []
    for category in document["categories"]:
        own = [(score, iou) for number, score, iou, _ in overlapping if number == category["id"]]
        if own and any(e["category_id"] == category["id"] and not e["iscrowd"] for e in document["annotations"]):
            of_classes.append(slow_error(own))
    assert len(of_classes) > 1
    assert errors.la_ece == pytest.approx(sum(of_classes) / len(of_classes))
    assert errors.la_ece != pytest.approx(errors.d_ece, abs=1e-3)


def test_by_hand() -> None:
    # Two bins: (0, 0.5] holds 0.1 (wrong) and 0.5 (right), (0.5, 1] holds 0.7 (right):
    # 2/3 * |0.3 - 0.5| + 1/3 * |0.7 - 1|
    reliability = Reliability.of(np.array([0.7, 0.1, 0.5]), np.array([1.0, 0.0, 1.0]), bins=2)
    assert reliability.error == pytest.approx(2 / 3 * 0.2 + 1 / 3 * 0.3)
    assert reliability.counts.tolist() == [2, 1]


def test_scores_that_are_right_as_often_as_they_say_have_no_error() -> None:
    scores = np.repeat([0.25, 0.75], 400)
    right = np.tile([1.0, 0.0, 0.0, 0.0], 100).tolist() + np.tile([1.0, 1.0, 1.0, 0.0], 100).tolist()
    assert Reliability.of(scores, np.array(right)).error == pytest.approx(0)


def test_scores_of_zero_and_one_and_no_detections() -> None:
    assert Reliability.of(np.array([0.0, 1.0]), np.array([0.0, 1.0])).counts.tolist() == [1, 1]
    assert math.isnan(Evaluator(random_document(0)).calibration_errors().d_ece)


def test_numbers_are_positions_among_all_detections_also_where_lvis_counts_only_some() -> None:
    document = random_lvis_document(1)
    evaluator = Evaluator(document, style="lvis")
    detections = random_detections(document, 5, masks=False)
    evaluator.add(list(detections), list(detections.values()))
    matched = evaluator.matched()
    assert 0 < len(matched.numbers) < len(evaluator.detections)
    for score, label, number in zip(matched.scores, matched.labels, matched.numbers, strict=True):
        record = evaluator.detections[number]
        assert (record["score"], record["category_id"]) == (score, evaluator.categories[label - 1])
