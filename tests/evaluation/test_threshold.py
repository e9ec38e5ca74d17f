"""The precision-recall curve and the threshold of the best F1."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.ops import box_iou

from bucketrank.evaluation import Curve, Evaluator, best_threshold
from tests.evaluation.random_detections import random_detections, random_document


def test_by_hand() -> None:
    # Right and wrong by falling score: 1 1 0 1 0, of 4 objects.
    curve = Curve.of(
        scores=np.array([0.2, 0.9, 0.5, 0.8, 0.3]), right=np.array([False, True, False, True, True]), objects=4
    )
    np.testing.assert_allclose(curve.scores, [0.9, 0.8, 0.5, 0.3, 0.2])
    np.testing.assert_allclose(curve.precision, [1, 1, 2 / 3, 3 / 4, 3 / 5])
    np.testing.assert_allclose(curve.recall, [1 / 4, 2 / 4, 2 / 4, 3 / 4, 3 / 4])
    np.testing.assert_allclose(curve.f1, [2 / 5, 4 / 6, 4 / 7, 6 / 8, 6 / 9])  # 2 right / (shown + objects)
    assert best_threshold(curve) == pytest.approx(0.25), "between 0.3 and 0.2"


def test_nothing_right() -> None:
    nothing = np.zeros(0)
    assert math.isnan(best_threshold(Curve.of(scores=nothing, right=nothing.astype(bool), objects=3)))
    assert math.isnan(best_threshold(Curve.of(scores=np.ones(2), right=np.zeros(2, dtype=bool), objects=3)))
    curve = Curve.of(scores=np.ones(2), right=np.zeros(2, dtype=bool), objects=0)
    assert np.isnan(curve.recall).all()
    assert math.isnan(best_threshold(curve))


rows = st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.3, 0.7]), st.booleans()), min_size=1, max_size=12)


@given(rows, st.integers(0, 5))
def test_no_other_threshold_is_better(rows: list[tuple[float, bool]], more: int) -> None:
    scores = np.array([score for score, _ in rows])
    right = np.array([each for _, each in rows])
    objects = int(right.sum()) + more

    def f1(threshold: float) -> float:
        shown = scores >= threshold
        return 2 * int(right[shown].sum()) / (int(shown.sum()) + objects) if objects else 0.0

    threshold = best_threshold(Curve.of(scores=scores, right=right, objects=objects))
    if right.any():
        assert f1(threshold) == pytest.approx(max(f1(each) for each in scores))
    else:
        assert math.isnan(threshold)


def matched(ground_truth: dict[str, Any], detections: dict[int, dict[str, torch.Tensor]]) -> list[tuple[float, bool]]:
    """Match by COCO's rule: by descending score, each detection takes the free object of highest IoU.

    A detection on a crowd does not count.
    """
    rows = []
    numbers = sorted(category["id"] for category in ground_truth["categories"])
    for image, each in detections.items():
        for label in range(1, len(numbers) + 1):
            own = [
                e
                for e in ground_truth["annotations"]
                if (e["image_id"], e["category_id"]) == (image, numbers[label - 1])
            ]
            corners = torch.tensor([e["bbox"] for e in own], dtype=torch.float64).reshape(-1, 4)
            corners[:, 2:] += corners[:, :2]
            chosen = torch.where(each["labels"] == label)[0]
            order = sorted(chosen.tolist(), key=lambda k: -float(each["scores"][k]))
            free = {k for k, e in enumerate(own) if not e["iscrowd"]}
            for k in order:
                box = each["boxes"][k].double()[None]
                overlap = box_iou(box, corners)[0]
                best = max(free, key=lambda o: float(overlap[o]), default=None)
                if best is not None and overlap[best] >= 0.5:
                    free.remove(best)
                    rows.append((float(each["scores"][k]), True))
                    continue
                area = float((box[0, 2] - box[0, 0]) * (box[0, 3] - box[0, 1]))
                shared = (torch.minimum(box[:, 2:], corners[:, 2:]) - torch.maximum(box[:, :2], corners[:, :2])).clamp(
                    0
                )
                crowd = any(float(shared[o].prod()) / area >= 0.5 for o, e in enumerate(own) if e["iscrowd"])
                if not crowd:
                    rows.append((float(each["scores"][k]), False))
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_the_curve_counts_as_coco_matches(seed: int) -> None:
    ground_truth = random_document(seed, images=20)
    detections = random_detections(ground_truth, seed + 50, masks=False)
    evaluator = Evaluator(ground_truth)
    evaluator.add(list(detections), list(detections.values()))
    curve = evaluator.precision_recall()
    rows = matched(ground_truth, detections)
    objects = sum(not entry["iscrowd"] for entry in ground_truth["annotations"])
    expected = Curve.of(
        scores=np.array([score for score, _ in rows]), right=np.array([right for _, right in rows]), objects=objects
    )
    np.testing.assert_allclose(curve.scores, expected.scores)
    np.testing.assert_allclose(curve.precision, expected.precision)
    np.testing.assert_allclose(curve.recall, expected.recall)
    assert evaluator.best_threshold() == best_threshold(expected)


def test_masks_have_a_curve_of_their_own() -> None:
    ground_truth = random_document(1)
    detections = random_detections(ground_truth, 3, masks=True, noise=0.05)
    evaluator = Evaluator(ground_truth, masks=True)
    evaluator.add(list(detections), list(detections.values()))
    assert evaluator.precision_recall("masks").recall.max() > 0.1
    assert evaluator.precision_recall(iou=0.9).recall.max() < evaluator.precision_recall().recall.max()

    empty = [each | {"masks": torch.zeros_like(each["masks"])} for each in detections.values()]
    evaluator.add(list(detections), empty)
    assert evaluator.precision_recall("masks").recall.max() == 0
    assert evaluator.precision_recall("boxes").recall.max() > 0.1
