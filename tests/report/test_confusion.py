"""The confusion matrix, and what the built detectors have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bucketrank.detectors import build
from bucketrank.report.built import built_facts, differing, warning
from bucketrank.report.confusion import Confusion, confusion, confusion_section
from bucketrank.report.matching import match

BOX = [10.0, 10.0, 20.0, 20.0]
FAR = [60.0, 60.0, 20.0, 20.0]


def detected(category: int, box: list[float], score: float) -> dict[str, Any]:
    return {"category_id": category, "bbox": box, "score": score}


def annotated(category: int, box: list[float], *, crowd: bool = False) -> dict[str, Any]:
    return {"category_id": category, "bbox": box, "iscrowd": int(crowd)}


def counts(detections: list[dict[str, Any]], annotations: list[dict[str, Any]], *, threshold: float = 0.5) -> Any:
    """Return the matrix of one image with the classes 7 and 3."""
    return confusion([match({"id": 1}, detections, annotations)], [7, 3], threshold=threshold).counts.tolist()


def test_a_correct_detection_is_on_the_diagonal() -> None:
    assert counts([detected(7, BOX, 0.9)], [annotated(7, BOX)]) == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert counts([detected(3, BOX, 0.5)], [annotated(3, BOX)]) == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_an_object_is_taken_for_another_class_or_missed() -> None:
    assert counts([detected(3, BOX, 0.9)], [annotated(7, BOX)]) == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert counts([detected(3, FAR, 0.9)], [annotated(7, BOX)]) == [[0, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert counts([], [annotated(7, BOX)]) == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_detections_below_the_threshold_do_not_count() -> None:
    low = [detected(7, BOX, 0.4), detected(3, FAR, 0.49)]
    assert counts(low, [annotated(7, BOX)]) == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    # The correct detection lies below the threshold, so the wrong class takes the object.
    assert counts([detected(3, BOX, 0.9), *low], [annotated(7, BOX)]) == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]


def test_the_right_class_comes_first_whatever_the_score() -> None:
    both = [detected(3, BOX, 0.9), detected(7, BOX, 0.6)]
    assert counts(both, [annotated(7, BOX)]) == [[1, 0, 0], [0, 0, 0], [0, 1, 0]], "the other one is on background"


def test_the_highest_score_takes_the_nearest_object_of_another_class() -> None:
    shifted = [12.0, 10.0, 20.0, 20.0]
    twice = [detected(3, BOX, 0.8), detected(3, BOX, 0.9)]
    assert counts(twice, [annotated(7, shifted), annotated(7, BOX)]) == [[0, 2, 0], [0, 0, 0], [0, 0, 0]]
    assert counts(twice, [annotated(7, BOX)]) == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]


def test_crowds_do_not_count() -> None:
    crowd = annotated(7, [0.0, 0.0, 100.0, 100.0], crowd=True)
    assert counts([detected(7, BOX, 0.9)], [crowd]) == np.zeros((3, 3), int).tolist()


def section(size: int, *, threshold: float = 0.5) -> str:
    rng = np.random.default_rng(0)
    matrix = rng.integers(0, 3, (size + 1, size + 1))
    matrix[-1, -1] = 0
    matrix[0, size // 2] = 50
    names = {number: f"class {number}" for number in range(size)}
    return confusion_section(Confusion(list(names), matrix), names, threshold=threshold)


@pytest.mark.parametrize("size", [1, 12])
def test_few_classes_show_the_whole_matrix(size: int) -> None:
    text = section(size)
    assert text.count("<tr>") == size + 2
    assert text.count("<td ") == (size + 1) ** 2 - 1, "no background on background"
    assert "background" in text
    assert "missed" in text


def test_many_classes_show_the_most_confused_pairs() -> None:
    text = section(80)
    assert '<th scope="row">class 0</th><td>class 40</td><td>50</td>' in text
    assert text.count("<tr>") == (1 + 15) + (1 + 80)


def test_nothing_to_count_is_said() -> None:
    assert "no stored threshold" in section(3, threshold=0.0)
    empty = Confusion([1], np.zeros((2, 2), dtype=np.int64))
    assert "no objects" in confusion_section(empty, {1: "cat"}, threshold=0.5)


def facts(name: str, loss: str, **settings: Any) -> dict[str, str]:
    small: dict[str, Any] = {"channels": 32, "backbone": "test_resnet", "min_size": 64, "max_size": 64}
    return built_facts(build(name, num_classes=3, loss=loss, **small, **settings))


def test_heads_that_differ_with_the_loss_are_found() -> None:
    ranked, scored = facts("atss", "rs"), facts("atss", "focal")
    assert (ranked["class outputs"], scored["class outputs"]) == ("9", "3")
    assert (ranked["quality branch"], scored["quality branch"]) == ("no", "yes")
    assert ranked["box loss weight"] == "scaled to the classification loss"
    assert scored["box loss weight"] == "2"
    assert ranked["anchors per location"].startswith("3 ")
    found = warning([ranked, scored], []).partition("cause: ")[2].removesuffix(".</p>").split(", ")
    assert {"anchors per location", "class outputs", "quality branch", "box loss weight"} <= {*found}
    assert not {"loss", "initial score", "trained parameters"} & {*found}
    same_head = facts("atss", "focal", anchors=3, quality_branch=False, box_balance=True, box_confidence=True)
    assert warning([ranked, same_head], []) == ""
    assert warning([ranked, same_head], ["loss.name", "trainer.seed"]) == ""
    assert "schedule.epochs." in warning([ranked, same_head], ["loss.name", "schedule.epochs"])
    assert warning([ranked, ranked], ["schedule.epochs"]) == "", "no comparison of losses"
    assert {"loss", "initial score"} >= {*differing([ranked, same_head])} - {"trained parameters"}


def test_every_head_of_a_two_stage_detector_is_described() -> None:
    found = facts("faster_rcnn", "ce", hidden=32)
    assert found["box_head: class outputs"] == "4", "3 classes and the background"
    assert found["box_head: scores"] == "softmax with background"
    assert found["rpn: candidates"] == "balanced sample"
    assert found["rpn: class outputs"] == "3", "anchors per location"
