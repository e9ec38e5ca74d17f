"""Calibration of a detector with chosen candidates: scores become probabilities, order and AP stay."""

from __future__ import annotations

import itertools
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader

import bucketrank
from bucketrank.data import Split, find_splits, write_shapes
from bucketrank.errors import CannotCalibrateError
from bucketrank.evaluation import Evaluator
from bucketrank.evaluation.calibration import ScoreHead, ScoreMap, calibrate, calibrate_scores, fold
from bucketrank.evaluation.calibration.fitting import Samples, collect
from bucketrank.settings.choices import CalibrationMethod
from tests.evaluation.calibration.listed_detector import CLASSES, ListedDetector, listed_images

TRAIN, VAL = listed_images(60, seed=1), listed_images(60, seed=2)


def detections(model: ListedDetector, items: list[Any] = VAL) -> list[dict[str, Tensor]]:
    with torch.no_grad():
        results: list[dict[str, Tensor]] = model([image for image, _ in items])
    return results


def evaluated(model: ListedDetector, items: list[Any] = VAL) -> Evaluator:
    annotations = [
        {"id": 1, "image_id": number, "category_id": int(label), "bbox": [x1, y1, x2 - x1, y2 - y1]}
        for number, (_, target) in enumerate(items)
        for (x1, y1, x2, y2), label in zip(target["boxes"].tolist(), target["labels"], strict=True)
    ]
    evaluator = Evaluator(
        {
            "images": [{"id": number, "width": 1000, "height": 1000} for number in range(len(items))],
            "categories": [{"id": label, "name": str(label)} for label in range(1, CLASSES + 1)],
            "annotations": annotations,
        }
    )
    evaluator.add(list(range(len(items))), detections(model, items))
    return evaluator


def test_scores_become_probabilities_and_order_and_ap_stay() -> None:
    model = ListedDetector()
    before, ranked = evaluated(model), detections(model)
    assert max(float(each["scores"].max()) for each in ranked) < 0.3, "nothing is found at 0.3"
    calibration = bucketrank.calibrate(model, TRAIN)
    after = evaluated(model)
    assert before.calibration_errors().d_ece > 0.1
    assert after.calibration_errors().d_ece < 0.03
    assert calibration.d_ece[1] < 0.02 < 0.1 < calibration.d_ece[0]
    assert_close(after.result().metrics, before.result().metrics, atol=1e-4, rtol=0.0, equal_nan=True)
    for one, other in zip(ranked, detections(model), strict=True):
        assert_close(other["boxes"], one["boxes"])
        assert torch.equal(other["labels"], one["labels"])
    objects = sum(len(target["labels"]) for _, target in VAL)
    shown = sum(int((each["scores"] >= 0.5).sum()) for each in detections(model))
    assert 0.6 * objects < shown < 1.4 * objects


def test_the_folded_layer_is_the_map() -> None:
    model = ListedDetector()
    weight, bias = model.classes.weight.clone(), model.classes.bias.clone()
    calibration = calibrate(model, TRAIN)
    (a,), (b,) = calibration.a, calibration.b
    assert a > 1
    assert_close(model.classes.weight.detach(), weight.detach() * a)
    assert_close(model.classes.bias.detach(), bias.detach() * a + b)
    assert not model.classes.weight.is_inference()
    model.classes(torch.zeros(1, CLASSES)).sum().backward()  # the model can still be trained
    assert calibration.images == len(TRAIN)
    assert 0 < calibration.right < calibration.detections


def test_thresholds_show_the_same_detections() -> None:
    model = ListedDetector()
    model.stored_threshold, model.score_threshold = 0.05, 0.02
    shown = [int((each["scores"] >= 0.05).sum()) for each in detections(model)]
    total = [len(each["scores"]) for each in detections(model)]
    calibrate(model, TRAIN)
    assert model.stored_threshold > model.score_threshold > 0
    assert [int((each["scores"] >= model.stored_threshold).sum()) for each in detections(model)] == shown
    assert [len(each["scores"]) for each in detections(model)] == total


def test_expected_iou() -> None:
    match, iou = ListedDetector(), ListedDetector()
    to_match, to_iou = calibrate(match, TRAIN), calibrate(iou, TRAIN, target="iou")
    assert to_iou.la_ece[1] < to_match.la_ece[1] < to_match.la_ece[0]
    assert evaluated(iou).calibration_errors().la_ece < 0.05


def test_a_pair_per_class_keeps_the_order_within_each_class() -> None:
    model = ListedDetector()
    with torch.no_grad():
        model.classes.bias.copy_(torch.tensor([-5.0, -4.0, -1.0]))  # the classes need other shifts
        model.classes.weight[1] *= 3
    common, before = deepcopy(model), evaluated(model)
    shared = calibrate(common, TRAIN)
    calibration = calibrate(model, TRAIN, per_class=True)
    assert len(calibration.a) == CLASSES
    assert calibration.d_ece[1] < shared.d_ece[1]
    assert_close(evaluated(model).result().metrics["AP"], before.result().metrics["AP"], atol=1e-4, rtol=0.0)
    assert evaluated(model).calibration_errors().d_ece < 0.05


def test_a_class_with_too_few_detections_takes_the_common_pair() -> None:
    rare = [
        (image, {"boxes": target["boxes"][target["labels"] < 3], "labels": target["labels"][target["labels"] < 3]})
        for image, target in TRAIN
    ]
    calibration = calibrate(ListedDetector(), rare, per_class=True)
    common = calibrate(ListedDetector(), rare)
    assert (calibration.a[2], calibration.b[2]) == (common.a[0], common.b[0])
    assert calibration.a[0] != common.a[0]


def test_crowds_do_not_count() -> None:
    crowded = [(image, {**target, "iscrowd": torch.ones(len(target["labels"]))}) for image, target in TRAIN]
    with pytest.raises(CannotCalibrateError, match="got 0 and"):
        calibrate(ListedDetector(), crowded)
    mixed = calibrate(ListedDetector(), [*TRAIN, *crowded])
    alone = calibrate(ListedDetector(), TRAIN)
    assert mixed.right == alone.right
    assert alone.detections < mixed.detections < 2 * alone.detections


def test_softmax_needs_a_temperature() -> None:
    model = ListedDetector(softmax=True)
    state = deepcopy(model.state_dict())
    with pytest.raises(CannotCalibrateError, match=r"share a softmax.*method temperature"):
        calibrate(model, TRAIN)
    assert_close(model.state_dict(), state)
    before = evaluated(model)
    classes = [each["labels"] for each in detections(model)]
    calibration = calibrate(model, TRAIN, method="temperature")
    assert calibration.a[0] > 1
    assert calibration.d_ece[1] < 0.5 * calibration.d_ece[0]
    after = evaluated(model)
    assert after.calibration_errors().d_ece < 0.5 * before.calibration_errors().d_ece
    assert_close(after.result().metrics["AP"], before.result().metrics["AP"], atol=0.02, rtol=0.0)
    assert len(classes) == len(VAL)
    with pytest.raises(CannotCalibrateError, match=r"expected a softmax.*got sigmoid"):
        calibrate(ListedDetector(), TRAIN, method="temperature")


def test_the_model_stays_where_the_fit_fails() -> None:
    model = ListedDetector().train()
    model.stored_threshold = 0.05
    state = deepcopy(model.state_dict())
    nothing = [(image, {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}) for image, _ in TRAIN]
    for data, message in [(nothing, "got 0 and"), ([], "at least one image"), (TRAIN[:1], "at least 10")]:
        with pytest.raises(CannotCalibrateError, match=message):
            calibrate(model, data)
    assert_close(model.state_dict(), state)
    assert model.training
    assert model.stored_threshold == 0.05


def test_a_wrong_description_of_the_head_is_noticed_and_undone() -> None:
    class Halved(ListedDetector):
        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            return [each | {"scores": each["scores"] / 2} for each in super().forward(images)]

    model = Halved()
    state = deepcopy(model.state_dict())
    with pytest.raises(CannotCalibrateError, match="does not describe the model's last classification layers"):
        calibrate(model, TRAIN)
    assert_close(model.state_dict(), state)


def test_products_are_refused_with_the_reason() -> None:
    class Product(ListedDetector):
        def score_head(self) -> ScoreHead:
            return ScoreHead("other", reason="its score is a product")

    methods: tuple[CalibrationMethod, ...] = ("platt", "temperature")
    for method in methods:
        with pytest.raises(CannotCalibrateError, match="cannot be calibrated: its score is a product"):
            calibrate(Product(), TRAIN, method=method)


def test_batches_and_iterators_and_most() -> None:
    images, targets = [image for image, _ in TRAIN], [target for _, target in TRAIN]
    once = calibrate(ListedDetector(), TRAIN)
    assert calibrate(ListedDetector(), [(images[:30], targets[:30]), (images[30:], targets[30:])]) == once
    assert calibrate(ListedDetector(softmax=True), iter(TRAIN), method="temperature").images == len(TRAIN)
    assert calibrate(ListedDetector(), TRAIN, max_images=20).images == 20
    endless = itertools.cycle(TRAIN)
    assert calibrate(ListedDetector(), endless, max_images=20) == calibrate(ListedDetector(), TRAIN, max_images=20)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="expected a bucketrank detector, got Linear; for torchvision"):
        calibrate(torch.nn.Linear(2, 2), TRAIN)
    with pytest.raises(ValueError, match="expected one of match, iou, got 'ious'; the nearest"):
        calibrate(ListedDetector(), TRAIN, target="ious")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected labels from 1 to 3, got 4"):
        calibrate(ListedDetector(), [(TRAIN[0][0], {"boxes": torch.zeros(1, 4), "labels": torch.tensor([4])})])
    with pytest.raises(ValueError, match="per_class: expected False"):
        calibrate(ListedDetector(softmax=True), TRAIN, per_class=True, method="temperature")


def test_fit_and_fold_for_any_model() -> None:
    model = ListedDetector()
    targets = [target for _, target in TRAIN]
    calibration = calibrate_scores(detections(model, TRAIN), targets, num_classes=CLASSES, first_label=1)
    assert calibration == calibrate(deepcopy(model), TRAIN)
    fold(ScoreHead("sigmoid", layers=(model.classes,), columns=CLASSES), calibration.score_map)
    assert evaluated(model).calibration_errors().d_ece < 0.03
    with pytest.raises(ValueError, match="one pair or 3"):
        fold(model.score_head(), ScoreMap((1.0, 1.0), (0.0, 0.0)))


def test_folding_is_rounded_once_in_bfloat16() -> None:
    # 1.01 * -40.25 + 40 = -0.6525. Between the two steps, bfloat16 would round -40.6525 to -40.75.
    layer = torch.nn.Linear(2, 1).to(torch.bfloat16)
    with torch.no_grad():
        layer.bias.fill_(-40.25)
    fold(ScoreHead("sigmoid", layers=(layer,)), ScoreMap((1.01,), (40.0,)))
    assert layer.bias.dtype is torch.bfloat16
    assert layer.bias.tolist() == pytest.approx([-0.6525], rel=2**-8)


def test_convolutions_with_several_anchors_take_a_pair_per_class() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(4, 2 * CLASSES, 1)
    features = torch.randn(1, 4, 5, 5)
    before = layer(features).unflatten(1, (2, CLASSES))
    score_map = ScoreMap((1.0, 2.0, 3.0), (0.5, 0.0, -0.5))
    fold(ScoreHead("sigmoid", layers=(layer, layer), columns=CLASSES), score_map)  # listed twice, folded once
    a, b = (torch.tensor(each)[:, None, None] for each in (score_map.a, score_map.b))
    assert_close(layer(features).unflatten(1, (2, CLASSES)), before * a + b)


def test_heads_that_cannot_be_folded_are_refused() -> None:
    with pytest.raises(TypeError, match="with a bias"):
        ScoreHead("sigmoid", layers=(torch.nn.Linear(2, 2, bias=False),))
    with pytest.raises(ValueError, match="multiple of 3 outputs, got 4"):
        ScoreHead("sigmoid", layers=(torch.nn.Linear(2, 4),), columns=3)
    with pytest.raises(ValueError, match="background column for a softmax"):
        ScoreHead("softmax", layers=(torch.nn.Linear(2, 3),), columns=3)


def test_images_of_a_folder_are_spread_over_its_training_split(tmp_path: Path) -> None:
    from bucketrank.evaluation.calibration.fitting import Samples

    write_shapes(tmp_path, train=8, val=2, size=64)
    samples = Samples.of(tmp_path, lambda image: {}, max_images=4)
    ids = [int(target["image_id"]) for _, target in samples.items]
    split = find_splits(tmp_path).train
    assert samples.split == split is not None
    every = [image["id"] for image in split.read()["images"]]
    assert ids == every[::2]
    assert len(list(Samples.of(tmp_path, lambda image: {}, max_images=None).items)) == 8
    assert np.unique(ids).size == 4


def test_a_loader_that_shuffles_may_be_used() -> None:
    """It gives the images in another order each time."""

    def shuffled() -> DataLoader[Any]:
        return DataLoader(TRAIN, batch_size=4, shuffle=True, collate_fn=lambda items: tuple(zip(*items, strict=True)))  # type: ignore[arg-type]

    alone = calibrate(ListedDetector(), TRAIN)
    for seed in range(3):
        torch.manual_seed(seed)
        calibration = calibrate(ListedDetector(), shuffled())
        assert (*calibration.a, *calibration.b) == pytest.approx((*alone.a, *alone.b))
    model = ListedDetector(softmax=True)
    torch.manual_seed(0)
    some = calibrate(model, shuffled(), method="temperature", max_images=20)
    torch.manual_seed(0)
    seen = list(Samples.first(shuffled(), dict, max_images=20).items)
    assert some.d_ece == pytest.approx(calibrate(ListedDetector(softmax=True), seen, method="temperature").d_ece)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["platt", "temperature"])
def test_autocast_does_not_change_the_calibration(method: CalibrationMethod, dtype: torch.dtype) -> None:
    """Its rounded copies of the weights are from before they were folded."""
    model, other = ListedDetector(softmax=method == "temperature"), ListedDetector(softmax=method == "temperature")
    expected = calibrate(other, TRAIN, method=method)
    with torch.autocast("cpu", dtype):
        detections(model)
        assert calibrate(model, TRAIN, method=method) == expected
        (now, *_), (after, *_) = detections(model), detections(other)
    assert_close(now["scores"], after["scores"])


def test_every_module_keeps_its_mode() -> None:
    model = ListedDetector()
    model.frozen = torch.nn.BatchNorm1d(2)
    model.train()
    model.frozen.eval()
    calibrate(model, TRAIN)
    assert model.training
    assert model.classes.training
    assert not model.frozen.training


def test_a_class_whose_scores_say_nothing_takes_the_common_pair() -> None:
    """In class 3, right detections have lower scores than wrong ones."""
    reversed_class = []
    for image, target in TRAIN:
        changed = image.clone()
        changed[:, 6] = -changed[:, 6]
        reversed_class.append((changed, target))
    calibration = calibrate(ListedDetector(), reversed_class, per_class=True)
    common = calibrate(ListedDetector(), reversed_class)
    assert (calibration.a[2], calibration.b[2]) == (common.a[0], common.b[0])
    assert calibration.a[0] != common.a[0]


def test_a_limit_that_keeps_other_detections_is_no_wrong_description() -> None:
    """Class 1 has high scores that mean little, class 2 low ones that mean much, and only three are kept."""
    model = ListedDetector(limit=3)
    with torch.no_grad():
        model.classes.bias.copy_(torch.tensor([1.0, -3.0, -9.0]))
        model.classes.weight[0] *= 0.2
        model.classes.weight[1] *= 2
    for order in (TRAIN, TRAIN[::-1]):
        assert len(calibrate(deepcopy(model), order, per_class=True).a) == CLASSES


def test_other_entries_of_detections_are_left_alone() -> None:
    found = [{**each, "image_id": 7} for each in detections(ListedDetector(), TRAIN)]
    targets = [target for _, target in TRAIN]
    assert calibrate_scores(found, targets) == calibrate_scores(detections(ListedDetector(), TRAIN), targets)


def test_logits_belong_to_their_detections_under_the_rules_of_lvis(tmp_path: Path) -> None:
    """LVIS keeps 300 detections per image; this detector returns more."""
    items = listed_images(2, objects=120)
    annotations = [
        {"image_id": number, "category_id": int(label), "bbox": [x1, y1, x2 - x1, y2 - y1]}
        for number, (_, target) in enumerate(items)
        for (x1, y1, x2, y2), label in zip(target["boxes"].tolist(), target["labels"], strict=True)
    ]
    document = {
        "images": [
            {"id": n, "width": 1000, "height": 1000, "neg_category_ids": [], "not_exhaustive_category_ids": []}
            for n in range(len(items))
        ],
        "categories": [{"id": label, "name": str(label), "frequency": "f"} for label in range(1, CLASSES + 1)],
        "annotations": [{"id": n, "area": 1600.0, **entry} for n, entry in enumerate(annotations, start=1)],
    }
    (tmp_path / "train.json").write_text(json.dumps(document))
    model = ListedDetector(softmax=True, limit=500)
    assert min(len(each["scores"]) for each in detections(model, items)) > 300
    images = [(image, {"image_id": number}) for number, (image, _) in enumerate(items)]
    outcomes = collect(
        model.score_head(), Samples(images, lambda image: model([image])[0], Split(tmp_path / "train.json", tmp_path))
    )
    assert outcomes.logits is not None
    matched = outcomes.matched
    scores = torch.from_numpy(outcomes.logits).softmax(1).numpy()[matched.numbers, outcomes.columns(matched)]
    np.testing.assert_allclose(scores, matched.scores, atol=1e-6)
