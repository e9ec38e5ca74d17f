"""Matching of detections and objects, and the choice of the best and worst images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bucketrank.data import Split
from bucketrank.evaluation import Evaluator
from bucketrank.report.matching import MatchCounts, MatchedImage, best_and_worst, match, match_all

from .synthetic_reports import as_tensors, noisy_detections

IMAGE = {"id": 1, "width": 100, "height": 100}


def record(box: list[float], score: float, category: int = 1) -> dict[str, Any]:
    return {"image_id": 1, "category_id": category, "bbox": box, "score": score}


def annotation(box: list[float], category: int = 1, **more: Any) -> dict[str, Any]:
    return {"image_id": 1, "category_id": category, "bbox": box, **more}


def outcomes(matched: MatchedImage) -> list[tuple[float, str, float]]:
    return [(each.score, each.outcome, round(each.iou, 3)) for each in matched.detections]


def test_the_better_detection_takes_the_object():
    matched = match(IMAGE, [record([0, 0, 10, 10], 0.3), record([0, 0, 10, 8], 0.9)], [annotation([0, 0, 10, 10])])
    assert outcomes(matched) == [(0.9, "correct", 0.8), (0.3, "wrong", 1.0)]
    assert matched.objects[0].matched_score == 0.9


def test_the_object_with_the_highest_iou_is_taken():
    annotations = [annotation([0, 0, 10, 10]), annotation([1, 0, 10, 10])]
    matched = match(IMAGE, [record([1, 0, 10, 10], 0.9), record([1, 0, 10, 10], 0.8)], annotations)
    assert outcomes(matched) == [(0.9, "correct", 1.0), (0.8, "correct", 0.818)]


@pytest.mark.parametrize(("height", "outcome"), [(5.0, "correct"), (4.99, "wrong")])
def test_an_iou_of_exactly_half_is_enough(height, outcome):
    assert outcomes(match(IMAGE, [record([0, 0, 10, height], 0.5)], [annotation([0, 0, 10, 10])]))[0][1] == outcome


def test_another_class_does_not_count():
    matched = match(IMAGE, [record([0, 0, 10, 10], 0.5, category=2)], [annotation([0, 0, 10, 10])])
    assert outcomes(matched) == [(0.5, "wrong", 0.0)]


def test_detections_on_a_crowd_are_ignored():
    crowd = annotation([0, 0, 50, 50], iscrowd=1)
    matched = match(IMAGE, [record([0, 0, 10, 10], 0.9), record([45, 0, 20, 10], 0.8)], [crowd])
    assert [each.outcome for each in matched.detections] == ["ignored", "wrong"]
    assert matched.counts(0) == MatchCounts(correct=0, wrong=1, missed=0)


def test_lvis_ignores_classes_that_were_not_annotated():
    image = IMAGE | {"neg_category_ids": [2], "not_exhaustive_category_ids": [3]}
    records = [record([0, 0, 10, 10], 0.9 - category / 10, category) for category in (2, 3, 4)]
    annotations = [annotation([50, 50, 10, 10], 3)]
    assert [each.outcome for each in match(image, records, annotations, lvis=True).detections] == [
        "wrong",
        "ignored",
        "ignored",
    ]
    assert {each.outcome for each in match(image, records, annotations).detections} == {"wrong"}


def test_counts_by_hand():
    matched = match(IMAGE, [record([0, 0, 10, 10], 0.9), record([60, 0, 9, 9], 0.4)], [annotation([0, 0, 10, 10])] * 2)
    assert matched.counts(0.5) == MatchCounts(correct=1, wrong=0, missed=1)
    assert matched.counts(0.0) == MatchCounts(correct=1, wrong=1, missed=1)
    assert matched.counts(0.0).f1 == 0.5, "2 * 1 / (2 * 1 + 1 + 1)"
    assert matched.counts(0.95).f1 == 0.0
    assert MatchCounts(0, 0, 0).f1 is None


def test_counts_agree_with_the_evaluator(synthetic_data):
    document = Split(synthetic_data / "val.json", synthetic_data / "images").read()
    categories = sorted(category["id"] for category in document["categories"])
    by_image = noisy_detections(document, seed=5, noise=3.0)
    evaluator = Evaluator(document)
    evaluator.add(list(by_image), [as_tensors(each, categories) for each in by_image.values()])
    curve = evaluator.precision_recall()
    matched = match_all(document, [record for each in by_image.values() for record in each], images=list(by_image))
    for threshold in (0.2, 0.5, 0.7):
        counts = [each.counts(threshold) for each in matched]
        correct, wrong, missed = (
            sum(getattr(each, name) for each in counts) for name in ("correct", "wrong", "missed")
        )
        at = int(np.flatnonzero(curve.scores >= threshold)[-1])
        assert correct > 5
        assert correct / (correct + wrong) == pytest.approx(curve.precision[at])
        assert correct / (correct + missed) == pytest.approx(curve.recall[at])


def test_best_and_worst_are_disjoint():
    def image(number: int, correct: int, wrong: int) -> MatchedImage:
        annotations = [annotation([20 * each, 0, 10, 10]) for each in range(correct)]
        records = [record([20 * each, 0, 10, 10], 0.9) for each in range(correct)]
        records += [record([20 * each, 50, 10, 10], 0.8) for each in range(wrong)]
        return match(IMAGE | {"id": number}, records, annotations)

    images = [image(0, 1, 0), image(1, 3, 0), image(2, 1, 1), image(3, 0, 0), image(4, 0, 1), image(5, 0, 2)]
    best, worst = best_and_worst(images, threshold=0.5, count=2)
    assert [each.image["id"] for each in best] == [1, 0], "of two without mistakes, the one with more objects"
    assert [each.image["id"] for each in worst] == [5, 4], "the one with more mistakes comes first"
    best, worst = best_and_worst(images, threshold=0.5, count=9)
    assert sorted(each.image["id"] for each in [*best, *worst]) == [0, 1, 2, 4, 5], "3 has no objects and no detections"
    assert best_and_worst([], threshold=0.5, count=3) == ([], [])
