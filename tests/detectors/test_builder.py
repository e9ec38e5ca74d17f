"""``build``: detectors by name, with every setting as a keyword."""

from typing import Any

import pytest
import torch

from bucketrank.detectors import BackboneSettings, InputSettings, build
from bucketrank.settings import Settings, describe, detector_spec, detectors, libraries, loss_settings, losses

from .small_detectors import small_detector


def test_keywords_reach_their_group_of_settings():
    model = small_detector(
        "atss", loss="ap", delta=0.25, method="bucketed", topk=5, frozen_stages=2, min_size=(64, 96), nms=0.4
    )
    assert model.criterion.delta == 0.25
    assert model.criterion.settings.method == "bucketed"
    assert (model.topk, model.nms) == (5, 0.4)
    assert model.transform.min_size == (64, 96)
    assert not any(p.requires_grad for p in model.backbone.body.layer1.parameters())


def test_a_range_of_sizes():
    model = small_detector("atss", min_size=(64, 67), size_range=True)
    assert model.transform.min_size == (64, 65, 66, 67)
    drawn = {model.transform.resize(torch.rand(3, 20, 20))[0].shape[-1] for _ in range(60)}
    assert drawn == {64, 65, 66, 67}
    assert model.eval().transform.resize(torch.rand(3, 20, 20))[0].shape[-1] == 67


def test_groups_of_settings_can_be_passed_as_objects():
    model: Any = build(
        "retinanet",
        num_classes=2,
        backbone=BackboneSettings(name="test_resnet", frozen_stages=1),
        loss=loss_settings("rs", delta=0.1),
        inputs=InputSettings(min_size=64, max_size=64),
        delta=0.2,  # a keyword overrides the group
        channels=32,
    )
    assert model.criterion.delta == 0.2
    assert model.transform.max_size == 64


def test_no_two_groups_have_a_setting_of_the_same_name():
    """A keyword of build must have one meaning."""
    build_arguments = {"num_classes", "backbone", "loss", "inputs", "name"}
    for detector in (*detectors().values(), *libraries().values()):
        for loss in losses().values():
            groups_of_settings = (*detector.groups, loss.settings)
            groups = [*(names_of(each) - {"name"} for each in groups_of_settings), build_arguments]
            assert sum(map(len, groups)) == len(set().union(*groups))


def names_of(settings: type[Settings]) -> set[str]:
    return {setting.name for setting in describe(settings)}


def test_a_detector_inherits_the_settings_of_its_base():
    assert {"mask_rois", "hidden", "proposals"} <= names_of(detector_spec("mask_rcnn").settings)
    assert {"topk", "vote"} <= names_of(detector_spec("paa").settings)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "ats"}, ValueError, "expected one of faster_rcnn, .*got 'ats'; the nearest is \"atss\""),
        ({"name": "zzz"}, ValueError, "expected one of faster_rcnn, mask_rcnn"),
        ({"dleta": 0.1}, TypeError, "atss with loss rs has no setting 'dleta'; the nearest is \"delta\""),
        ({"loss": "focal", "delta": 0.1}, TypeError, "has no setting 'delta'"),
        ({"proposals": 10}, TypeError, "atss .*has no setting 'proposals'"),
        ({"loss": "focl"}, ValueError, 'the nearest is "focal"'),
        ({"backbone": "resnet1"}, ValueError, "the nearest names are"),
        ({"num_classes": 0}, ValueError, "num_classes: expected at least 1 .*, got 0"),
        ({"min_size": 0}, ValueError, "min_size"),
        ({"min_size": 200, "max_size": 100}, ValueError, "min_size.*max_size 100"),
        ({"channels": 48}, ValueError, "detector.channels: expected a multiple of 32.*got 48"),
    ],
)
def test_invalid_settings_name_the_nearest_valid_one(arguments, error, message):
    valid = {"name": "atss", "num_classes": 3, "backbone": "test_resnet", "channels": 32}
    with pytest.raises(error, match=message):
        build(**(valid | arguments))


def test_the_numbers_of_the_published_recipes():
    """Anchors, thresholds, weights and counts of the published code."""
    ranked, scored = small_detector("atss"), small_detector("atss", loss="focal")
    assert [model.head.boxes.out_channels // 4 for model in (ranked, scored)] == [3, 1]
    assert ranked.head.quality is None
    assert scored.head.quality is not None
    # One cell of the finest level: 32 pixels and two thirds of an octave above; 64 pixels.
    sides = [model.anchors([torch.zeros(1, 1, 1, 1)] * 5)[0][:, 2] * 2 for model in (ranked, scored)]
    torch.testing.assert_close(sides[0], torch.tensor([32, 32 * 2 ** (1 / 3), 32 * 2 ** (2 / 3)]))
    torch.testing.assert_close(sides[1], torch.tensor([64.0]))
    assert ranked.head.classes.bias[0].sigmoid().item() == pytest.approx(0.01)
    assert small_detector("paa", loss="focal").criterion.recipe.scored_box_weight == 1.3
    assert [small_detector("retinanet", loss=loss).head.boxes.out_channels // 4 for loss in ("rs", "focal")] == [6, 9]

    faster, cascade = small_detector("faster_rcnn"), small_detector("cascade_rcnn", stage_ious=(0.5, 0.6, 0.7))
    assert faster.rpn.criterion.recipe.ranking_weight == 0.2
    assert faster.rpn.head.cls_logits.bias[0] == 0
    assert faster.box_head.classes.out_features == 3  # no background
    assert small_detector("faster_rcnn", loss="ce").box_head.classes.out_features == 4
    assert [stage.positive_iou for stage in cascade.stages] == [0.5, 0.6, 0.7]
    assert all(stage.boxes.out_features == 4 for stage in cascade.stages)
    assert [faster.rpn.anchor_generator.border, cascade.rpn.anchor_generator.border] == [None, 0]
    defaults = {
        name: detector_spec(name).settings(name).proposals  # type: ignore[attr-defined]
        for name in ("faster_rcnn", "mask_rcnn", "cascade_rcnn")
    }
    assert defaults == {"faster_rcnn": 1000, "mask_rcnn": 1000, "cascade_rcnn": 2000}
