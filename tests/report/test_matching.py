"""Which detection found which object, and which images come first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bucketrank.data import Split
from bucketrank.evaluation import Evaluator
from bucketrank.report.matching import Counts, Matched, best_and_worst, match, match_all

from . import made_up

IMAGE = {"id": 1, "width": 100, "height": 100}


def record(box: list[float], score: float, category: int = 1) -> dict[str, Any]:
    return {"image_id": 1, "category_id": category, "bbox": box, "score": score}


def truth(box: list[float], category: int = 1, **more: Any) -> dict[str, Any]:
    return {"image_id": 1, "category_id": category, "bbox": box, **more}


def outcomes(found: Matched) -> list[tuple[float, str, float]]:
    return [(each.score, each.outcome, round(each.iou, 3)) for each in found.detections]


def test_the_first_takes_the_object_and_a_second_is_wrong():
    found = match(IMAGE, [record([0, 0, 10, 10], 0.3), record([0, 0, 10, 8], 0.9)], [truth([0, 0, 10, 10])])
    assert outcomes(found) == [(0.9, "right", 0.8), (0.3, "wrong", 1.0)]
    assert found.objects[0].found_at == 0.9


def test_of_two_free_objects_the_nearer_is_taken():
    truths = [truth([0, 0, 10, 10]), truth([1, 0, 10, 10])]
    found = match(IMAGE, [record([1, 0, 10, 10], 0.9), record([1, 0, 10, 10], 0.8)], truths)
    assert outcomes(found) == [(0.9, "right", 1.0), (0.8, "right", 0.818)]


@pytest.mark.parametrize(("height", "outcome"), [(5.0, "right"), (4.99, "wrong")])
def test_exactly_half_is_enough(height, outcome):
    assert outcomes(match(IMAGE, [record([0, 0, 10, height], 0.5)], [truth([0, 0, 10, 10])]))[0][1] == outcome


def test_another_class_does_not_count():
    found = match(IMAGE, [record([0, 0, 10, 10], 0.5, category=2)], [truth([0, 0, 10, 10])])
    assert outcomes(found) == [(0.5, "wrong", 0.0)]


def test_a_crowd_excuses_and_is_not_to_be_found():
    crowd = truth([0, 0, 50, 50], iscrowd=1)
    found = match(IMAGE, [record([0, 0, 10, 10], 0.9), record([45, 0, 20, 10], 0.8)], [crowd])
    assert [each.outcome for each in found.detections] == ["excused", "wrong"]
    assert found.counts(0) == Counts(right=0, wrong=1, missed=0)


def test_lvis_excuses_what_nobody_looked_for():
    image = IMAGE | {"neg_category_ids": [2], "not_exhaustive_category_ids": [3]}
    records = [record([0, 0, 10, 10], 0.9 - category / 10, category) for category in (2, 3, 4)]
    truths = [truth([50, 50, 10, 10], 3)]
    assert [each.outcome for each in match(image, records, truths, lvis=True).detections] == [
        "wrong",
        "excused",
        "excused",
    ]
    assert {each.outcome for each in match(image, records, truths).detections} == {"wrong"}


def test_counts_by_hand():
    found = match(IMAGE, [record([0, 0, 10, 10], 0.9), record([60, 0, 9, 9], 0.4)], [truth([0, 0, 10, 10])] * 2)
    assert found.counts(0.5) == Counts(right=1, wrong=0, missed=1)
    assert found.counts(0.0) == Counts(right=1, wrong=1, missed=1)
    assert found.counts(0.0).f1 == 0.5, "2 * 1 / (2 * 1 + 1 + 1)"
    assert found.counts(0.95).f1 == 0.0
    assert Counts(0, 0, 0).f1 is None


def test_as_the_evaluator_counts(made_up_data):
    document = Split(made_up_data / "val.json", made_up_data / "images").read()
    categories = sorted(category["id"] for category in document["categories"])
    found = made_up.detections(document, seed=5, noise=3.0)
    evaluator = Evaluator(document)
    evaluator.add(list(found), [made_up.tensors(each, categories) for each in found.values()])
    curve = evaluator.precision_recall()
    matched = match_all(document, [each for part in found.values() for each in part], images=list(found))
    for threshold in (0.2, 0.5, 0.7):
        counts = [each.counts(threshold) for each in matched]
        right, wrong, missed = (sum(getattr(each, name) for each in counts) for name in ("right", "wrong", "missed"))
        at = int(np.flatnonzero(curve.scores >= threshold)[-1])
        assert right > 5
        assert right / (right + wrong) == pytest.approx(curve.precision[at])
        assert right / (right + missed) == pytest.approx(curve.recall[at])


def test_best_and_worst_are_apart():
    def image(number: int, right: int, wrong: int) -> Matched:
        truths = [truth([20 * each, 0, 10, 10]) for each in range(right)]
        records = [record([20 * each, 0, 10, 10], 0.9) for each in range(right)]
        records += [record([20 * each, 50, 10, 10], 0.8) for each in range(wrong)]
        return match(IMAGE | {"id": number}, records, truths)

    images = [image(0, 1, 0), image(1, 3, 0), image(2, 1, 1), image(3, 0, 0), image(4, 0, 1), image(5, 0, 2)]
    best, worst = best_and_worst(images, threshold=0.5, most=2)
    assert [each.image["id"] for each in best] == [1, 0], "of two without a mistake that with more objects"
    assert [each.image["id"] for each in worst] == [5, 4], "the one with more mistakes first"
    best, worst = best_and_worst(images, threshold=0.5, most=9)
    assert sorted(each.image["id"] for each in [*best, *worst]) == [0, 1, 2, 4, 5], "3 has nothing to show"
    assert best_and_worst([], threshold=0.5, most=3) == ([], [])
