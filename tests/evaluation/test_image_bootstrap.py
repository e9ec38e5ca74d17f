"""The AP of drawn images equals that of a data set in which these images are repeated."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from bucketrank.evaluation import BootstrapAP, Difference, Evaluator, ImageAP, paired_difference
from tests.evaluation.random_detections import random_detections, random_document


def evaluated(document: dict[str, Any], detections: dict[int, Any]) -> Evaluator:
    evaluator = Evaluator(document)
    evaluator.add(list(detections), list(detections.values()))
    return evaluator


def with_distinct_scores(detections: dict[int, Any]) -> dict[int, Any]:
    """Return the detections with scores of which no two are equal: the order of equal scores is nobody's rule."""
    total = sum(len(each["scores"]) for each in detections.values())
    numbers = iter(torch.randperm(total, generator=torch.Generator().manual_seed(0)).split(1))
    return {
        image: {**each, "scores": torch.tensor([float(next(numbers)) / total for _ in each["scores"]])}
        for image, each in detections.items()
    }


def repeated(document: dict[str, Any], detections: dict[int, Any], counts: list[int]) -> Evaluator:
    """Return the evaluator of a data set that holds each image as often as ``counts`` says."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    copies: dict[int, Any] = {}
    for image, count in zip(sorted(document["images"], key=lambda each: each["id"]), counts, strict=True):
        for number in range(count):
            new_id = image["id"] * 100 + number
            images.append({**image, "id": new_id})
            copies[new_id] = detections[image["id"]]
            annotations += [
                {**copy.deepcopy(entry), "image_id": new_id, "id": len(annotations) + offset + 1}
                for offset, entry in enumerate(e for e in document["annotations"] if e["image_id"] == image["id"])
            ]
    return evaluated({**document, "images": images, "annotations": annotations}, copies)


@pytest.mark.parametrize("seed", range(3))
def test_draws_equal_data_sets_with_repeated_images(seed: int) -> None:
    document = random_document(seed, images=8)
    detections = with_distinct_scores(random_detections(document, seed + 100, masks=False))
    matches = ImageAP.of(evaluated(document, detections))
    random = np.random.default_rng(seed)
    counts = random.multinomial(8, np.full(8, 1 / 8), size=3)
    expected = [repeated(document, detections, list(draw)).result().metrics["AP"] for draw in counts]
    np.testing.assert_allclose(matches.ap(counts.astype(float)), expected, atol=1e-9)
    whole = evaluated(document, detections).result().metrics["AP"]
    np.testing.assert_allclose(matches.ap(np.ones((1, 8))), whole, atol=1e-9)


def test_a_draw_without_objects_has_no_ap() -> None:
    document = random_document(0, images=4)
    with_objects = {entry["image_id"] for entry in document["annotations"]}
    document["images"].append({**document["images"][0], "id": 99})
    detections = with_distinct_scores(random_detections(document, 100, masks=False))
    matches = ImageAP.of(evaluated(document, detections))
    images = sorted(each["id"] for each in document["images"])
    counts = np.array([[1.0] * len(images), [float(image not in with_objects) for image in images]])
    assert np.isnan(matches.ap(counts)).tolist() == [False, True]


def test_masks_are_matched_by_their_masks() -> None:
    document = random_document(0, images=4)
    detections = with_distinct_scores(random_detections(document, 100, masks=True))
    evaluator = Evaluator(document, masks=True)
    evaluator.add(list(detections), list(detections.values()))
    boxes, masks = (ImageAP.of(evaluator, iou_type).ap(np.ones((1, 4)))[0] for iou_type in ("boxes", "masks"))
    assert boxes == pytest.approx(evaluator.result("boxes").metrics["AP"], abs=1e-9)
    assert masks == pytest.approx(evaluator.result("masks").metrics["AP"], abs=1e-9)
    assert boxes != pytest.approx(masks, abs=1e-3)


def worse(detections: dict[int, Any], share: float, seed: int) -> dict[int, Any]:
    """Return the detections with the boxes of a share of them moved far away."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for image, each in detections.items():
        away = torch.rand(len(each["scores"]), generator=generator) < share
        moved[image] = {**each, "boxes": torch.where(away[:, None], each["boxes"] + 500, each["boxes"])}
    return moved


def drawn(document: dict[str, Any], detections: dict[int, Any], *, draws: int = 200, seed: int = 0) -> BootstrapAP:
    return BootstrapAP.of(ImageAP.of(evaluated(document, detections)), draws=draws, seed=seed)


def test_verdicts() -> None:
    document = random_document(0, images=30)
    detections = random_detections(document, 1, masks=False)
    good = [drawn(document, detections)] * 2
    bad = [drawn(document, worse(detections, 0.6, seed)) for seed in range(2)]
    ahead = paired_difference(good, bad)
    assert ahead.verdict == "ahead"
    assert ahead.low < ahead.value < ahead.high
    behind = paired_difference(bad, good)
    assert behind.verdict == "behind"
    assert behind.value == pytest.approx(-ahead.value)
    same = paired_difference(good, good)
    assert (same.value, same.low, same.high, same.verdict) == (0, 0, 0, "level")
    assert paired_difference(good, bad) == paired_difference(good, bad), "the draws are seeded"
    with pytest.raises(ValueError, match="expected as many runs on both sides, got 2 and 1"):
        paired_difference(good, bad[:1])
    with pytest.raises(ValueError, match="expected the same number of draws"):
        paired_difference(good[:1], [drawn(document, detections, draws=50)])


def test_all_runs_share_the_draws_of_the_images() -> None:
    document = random_document(0, images=12)
    detections = random_detections(document, 1, masks=False)
    matches = ImageAP.of(evaluated(document, detections))
    whole = drawn(document, detections)
    assert whole.ap == pytest.approx(100 * evaluated(document, detections).result().metrics["AP"])
    counts = np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), size=200)
    np.testing.assert_array_equal(whole.draws, 100 * matches.ap(counts.astype(float)))
    assert not np.array_equal(whole.draws, drawn(document, detections, seed=1).draws)
    one, other = drawn(document, detections), drawn(document, worse(detections, 0.5, 0))
    difference = paired_difference([one], [other])
    half = 1.959964 * np.std(one.draws - other.draws, ddof=1)  # one seed: the images alone
    expected = [one.ap - other.ap - half, one.ap - other.ap + half]
    np.testing.assert_allclose([difference.low, difference.high], expected, rtol=1e-6)


def test_the_interval_by_hand() -> None:
    # Seeds: differences 1, 2, 3, variance 1, of their mean 1/3. Images: draws -1, 0, 1 around the mean, variance 1.
    ones = [BootstrapAP(each, np.array([each - 1, each, each + 1])) for each in (1.0, 2.0, 3.0)]
    zeros = [BootstrapAP(0.0, np.zeros(3))] * 3
    difference = paired_difference(ones, zeros)
    # Degrees of freedom 2 ((1 + 1/3) / (1/3))^2 = 32, whose quantile is 2.0369 in tables.
    half = 2.0369 * (1 + 1 / 3) ** 0.5
    assert difference.value == 2
    assert difference.low == pytest.approx(2 - half, abs=1e-4)
    assert difference.high == pytest.approx(2 + half, abs=1e-4)


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("image_deviation", [0.0, 1.0])
def test_the_interval_holds_the_true_difference_in_95_percent_of_all_studies(seeds, image_deviation) -> None:
    """Resampling three seeds would hold it in about 71 % of the studies if the seeds alone differ."""
    random = np.random.default_rng(0)
    studies, held = 1000, 0
    zeros = [BootstrapAP(0.0, np.zeros(200))] * seeds
    for _ in range(studies):
        shared, draws = image_deviation * random.normal(), image_deviation * random.normal(size=200)
        aps = random.normal(size=seeds) + shared
        difference = paired_difference([BootstrapAP(ap, ap + draws) for ap in aps], zeros)
        held += difference.low <= 0 <= difference.high
    assert 0.93 <= held / studies <= 0.99


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.04, 3.0, "level"), (0.06, 3.0, "ahead"), (-3.0, -0.04, "level"), (-3.0, -0.06, "behind"), (-1.0, 1.0, "level")],
)
def test_a_verdict_follows_the_numbers_as_they_are_shown(low: float, high: float, verdict: str) -> None:
    assert Difference((low + high) / 2, low, high).verdict == verdict


def test_draws_without_objects_do_not_count() -> None:
    draws = np.array([2.0, np.nan, 4.0, 3.0])
    ones, zeros = [BootstrapAP(3.0, draws)], [BootstrapAP(0.0, np.zeros(4))]
    difference = paired_difference(ones, zeros)
    assert difference.verdict == "ahead"
    assert difference.low == pytest.approx(3 - 1.959964, abs=1e-6)  # the variance of 2, 3, 4 is 1
    nothing = paired_difference([BootstrapAP(2.0, np.full(4, np.nan))], zeros)
    assert nothing.verdict == "inconclusive"


def test_only_the_detections_that_ap_counts() -> None:
    """COCO counts the 100 of highest score per image and class."""
    boxes = torch.arange(150).float()[:, None] * 20 + torch.tensor([0.0, 0, 10, 10])
    annotations = [
        {"id": number + 1, "image_id": 1, "category_id": 1, "bbox": [20.0 * number, 20.0 * number, 10, 10]}
        for number in range(150)
    ]
    images = [{"id": 1, "width": 4000, "height": 4000}]
    document = {"images": images, "categories": [{"id": 1, "name": "cell"}], "annotations": annotations}
    detections = {"boxes": boxes, "labels": torch.ones(150).long(), "scores": torch.linspace(1, 0.1, 150)}
    evaluator = evaluated(document, {1: detections})
    expected = evaluator.result().metrics["AP"]
    assert expected == pytest.approx(100 / 150, abs=0.01)
    np.testing.assert_allclose(ImageAP.of(evaluator).ap(np.ones((1, 1))), expected, atol=1e-9)
    assert len(evaluator.matched().scores) == 150
