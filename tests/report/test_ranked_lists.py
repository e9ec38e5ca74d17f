"""Gradients for the detections and the training candidates of an image, and their ranked lists."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from bucketrank.detectors import Detector, build
from bucketrank.report.built import describe_loss
from bucketrank.report.matching import Detection, Outcome
from bucketrank.report.measurements import (
    TrainingCandidates,
    candidates,
    delta_of,
    gradients,
)
from bucketrank.report.ranked_lists import MAX_ENTRIES, rank_candidates
from bucketrank.settings import detectors, loss_settings, losses

SMALL: dict[str, Any] = {"channels": 32, "min_size": 64, "max_size": 64, "backbone": "test_resnet"}
PER_DETECTOR: dict[str, dict[str, Any]] = {
    name: {"hidden": 32, "proposals": 40, "test_proposals": 40} for name in ("faster_rcnn", "mask_rcnn", "cascade_rcnn")
}
PER_DETECTOR["co_detr"] = {
    "queries": 20,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "feedforward": 32,
    "auxiliary_queries": 10,
}
PER_DETECTOR["co_dino"] = PER_DETECTOR["co_detr"]


def detection(score: float, outcome: Outcome, iou: float = 0.0) -> Detection:
    return Detection(1, (0, 0, 1, 1), score, outcome, iou, None)


LIST = [
    detection(0.9, "wrong"),
    detection(0.8, "correct", 0.7),
    detection(0.3, "ignored", 0.6),
    detection(0.1, "correct", 0.9),
]


def test_ap_loss_by_hand():
    computed = gradients(LIST, loss_settings("ap", delta=0.0))
    # One negative among two above the first positive, among three above the second: (1/2 + 1/3) / 2.
    assert computed.loss == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert computed.gradients == pytest.approx([(1 / 2 + 1 / 3) / 2, -1 / 4, 0, -1 / 6])
    assert computed.logits[0] == pytest.approx(math.log(9))


def test_rank_and_sort_lowers_the_worse_box():
    computed = gradients(LIST, loss_settings("rs", delta=0.0))
    ranked = gradients(LIST, loss_settings("ap", delta=0.0))
    # Sorting error of the last positive: (0.3 + 0.1) / 2 instead of 0.1. It lowers the first positive by this.
    assert computed.loss == pytest.approx(ranked.loss + (0.2 - 0.1) / 2)
    difference = [one - other for one, other in zip(computed.gradients, ranked.gradients, strict=True)]
    assert difference == pytest.approx([0, 0.05, 0, -0.05])


def test_focal_loss_by_hand():
    alpha, gamma = 0.25, 2.0
    computed = gradients([detection(0.2, "wrong")], loss_settings("focal", focal_alpha=alpha, focal_gamma=gamma))
    p = 0.2
    derived = (1 - alpha) * p**gamma * (p - gamma * (1 - p) * math.log(1 - p))
    assert computed.gradients == pytest.approx([derived])


def test_cross_entropy_by_hand():
    computed = gradients([detection(0.2, "wrong"), detection(0.6, "correct", 0.5)], loss_settings("ce"))
    assert computed.gradients == pytest.approx([0.2 / 2, (0.6 - 1) / 2])


@pytest.mark.parametrize("name", [name for name, spec in losses().items() if spec.criterion is not None])
def test_every_loss_has_gradients_of_the_right_sign(name):
    settings = loss_settings(name)
    computed = gradients(LIST, settings)
    assert computed.gradients[0] > 0 > computed.gradients[3]
    assert computed.gradients[2] == 0, "ignored detections have no gradient"
    assert describe_loss(settings).startswith(losses()[name].title)
    assert (delta_of(settings) is None) == (name in ("dr", "focal", "ce", "qfl", "vfl", "bce", "mal", "iabce"))
    assert gradients([], settings).gradients == []
    alone = gradients([detection(1.0, "wrong"), detection(0.0, "wrong")], settings)
    assert all(math.isfinite(each) for each in [*alone.logits, *alone.gradients]), "no positive, and scores of 0 and 1"


def image_and_target(*, masks: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    target = {"boxes": torch.tensor([[5.0, 5, 30, 35], [30, 20, 60, 60]]), "labels": torch.tensor([1, 2])}
    if masks:
        target["masks"] = torch.zeros(2, 64, 64, dtype=torch.uint8)
        target["masks"][0, 5:35, 5:30] = 1
    return torch.rand(3, 64, 64), target


def tiny(name: str, loss: str) -> Detector:
    torch.manual_seed(0)
    return build(name, num_classes=3, loss=loss, **SMALL | PER_DETECTOR.get(name, {})).eval()


@pytest.mark.parametrize("name", detectors())
def test_candidates_of_every_detector(name):
    model = tiny(name, "rs")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    image, target = image_and_target(masks=model.masks)
    ranked = candidates(model, image, target)
    assert ranked is not None
    assert not model.training
    assert not any(module.training for module in model.modules())
    torch.testing.assert_close(dict(model.state_dict()), before)
    assert int(ranked.positives.sum()) >= 2
    assert (ranked.logits.diff() <= 0).all()
    assert (ranked.ious[~ranked.positives] == 0).all()
    assert set(ranked.classes[ranked.positives].tolist()) == {0, 1}
    assert abs(float(ranked.gradients.sum())) < 1e-5, "positive and negative gradients cancel"
    assert float(ranked.gradients.abs().sum()) > 0.01
    if name.startswith("co_"):
        assert len(ranked.logits) == 20 * 3, "the queries of the last layer"
        assert int(ranked.positives.sum()) == 2, "one for each object"


def test_the_loss_is_the_one_of_training():
    model = tiny("atss", "rs")
    image, target = image_and_target(masks=False)
    ranked = candidates(model, image, target)
    assert ranked is not None
    model.train()
    for module in model.modules():
        module.training = module is model
    terms = model([image], [target])
    assert isinstance(terms, dict)
    assert ranked.loss == pytest.approx((terms["rank"] + terms["sort"]).item(), rel=1e-5)


def test_a_softmax_has_no_ranked_list():
    model = tiny("faster_rcnn", "ce")
    assert candidates(model, *image_and_target(masks=False)) is None


def candidates_of(roles: str, gradients: list[float]) -> TrainingCandidates:
    """Return candidates from a letter each: p for a positive, n for a negative."""
    count = len(roles)
    positives = torch.tensor([role == "p" for role in roles])
    return TrainingCandidates(
        logits=torch.arange(count, 0, -1.0),
        gradients=torch.tensor(gradients),
        positives=positives,
        ious=positives * 0.5,
        classes=torch.zeros(count, dtype=torch.int64),
        loss=0.5,
    )


def test_negatives_between_positives_are_one_bucket():
    ranked = rank_candidates(candidates_of("nnpnnnpp", [0.1, 0.2, -0.3, 0.1, 0.1, 0.1, -0.1, -0.2]), ["cat"])
    assert [(entry.role, round(entry.gradient, 5), entry.logit) for entry in ranked.entries] == [
        ("negative", 0.3, 7.5),
        ("positive", -0.3, 6.0),
        ("negative", 0.3, 4.0),
        ("positive", -0.1, 2.0),
        ("positive", -0.2, 1.0),
    ]
    assert ranked.entries[2].text.splitlines()[0] == "ranks 4 to 6: 3 negatives"
    assert ranked.entries[1].text.splitlines()[0] == "rank 3: positive, cat"
    assert ranked.about == "3 positives and 5 negatives in 2 buckets; the loss is 0.5."


def test_a_long_list_is_shortened():
    ranked = rank_candidates(candidates_of("pn" * 300, [0.0] * 600), ["cat"])
    assert len(ranked.entries) == MAX_ENTRIES
    assert re.search(r"first 200 of 600 bars", ranked.about)
