"""The adapter for criteria on the protocol of the DETR family, with criteria written for these tests."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import bucketrank.integrations.set_criterion as adapter
from bucketrank import ap_loss, rank_sort_loss
from bucketrank.integrations.set_criterion import undo, use_ranking_loss
from tests.integrations.gradients import gradient_of
from tests.integrations.set_criteria import (
    MatchabilityCriterion,
    SetCriterion,
    VarifocalCriterion,
    layers_and_targets,
)

CRITERIA = {"ce": SetCriterion, "vfl": VarifocalCriterion, "mal": MatchabilityCriterion}
every_criterion = pytest.mark.parametrize("criterion_class", CRITERIA.values(), ids=CRITERIA)


def values(losses):
    return {key: value.item() for key, value in losses.items()}


def ranking_of(logits, targets):
    return torch.stack(rank_sort_loss(logits, targets)).sum()


def iou(box, other):
    """Return the IoU of two boxes (cx, cy, w, h) of lists of floats."""
    sides = [
        max(0.0, min(a + s / 2, b + t / 2) - max(a - s / 2, b - t / 2))
        for a, s, b, t in zip(box[:2], box[2:], other[:2], other[2:], strict=True)
    ]
    shared = sides[0] * sides[1]
    return shared / (box[2] * box[3] + other[2] * other[3] - shared)


def expected_targets(layer, targets):
    """Return the targets of the ranking: query i of each image is matched to object i."""
    expected = torch.zeros_like(layer["pred_logits"])
    for image, target in enumerate(targets):
        for query, (label, box) in enumerate(zip(target["labels"], target["boxes"], strict=True)):
            overlap = iou(layer["pred_boxes"][image, query].tolist(), box.tolist())
            expected[image, query, label] = max(overlap, 1e-6)
    return expected


class TestLosses:
    def test_the_ranking_replaces_the_trained_key_and_the_logged_values_stay(self):
        layers, targets = layers_and_targets()
        losses = use_ranking_loss(SetCriterion())(layers, targets)
        for suffix, layer in zip(("", "_0"), layers, strict=True):
            expected = ranking_of(layer["pred_logits"], expected_targets(layer, targets))
            torch.testing.assert_close(losses["loss_ce" + suffix], expected)  # not divided by the 3 boxes
        assert losses["class_error"].item() == 12.5
        assert "class_error_0" not in losses

    def test_average_precision_has_labels_of_1(self):
        layers, targets = layers_and_targets()
        losses = use_ranking_loss(SetCriterion(), loss="ap", delta=0.7)(layers, targets)
        positives = (expected_targets(layers[0], targets) > 0).float()
        torch.testing.assert_close(losses["loss_ce"], ap_loss(layers[0]["pred_logits"], positives, delta=0.7))

    def test_boxes_are_balanced_to_the_ranking_of_their_layer_and_get_its_weight(self):
        layers, targets = layers_and_targets()
        criterion = SetCriterion()
        own = values(criterion(layers, targets))
        losses = values(use_ranking_loss(criterion)(layers, targets))
        for suffix in ("", "_0"):
            assert losses["loss_bbox" + suffix] == pytest.approx(losses["loss_ce" + suffix], rel=1e-6)
            assert losses["loss_giou" + suffix] == pytest.approx(losses["loss_ce" + suffix], rel=1e-6)
            assert losses["loss_size" + suffix] == own["loss_size" + suffix]
            weights = [criterion.weight_dict[stem + suffix] for stem in ("loss_ce", "loss_bbox", "loss_giou")]
            assert weights == [2, 2, 2]
            assert criterion.weight_dict["loss_size" + suffix] == 7
        assert losses["loss_ce"] != losses["loss_ce_0"]

    def test_a_fixed_box_weight_keeps_the_weights(self):
        layers, targets = layers_and_targets()
        criterion = SetCriterion()
        own, weights = values(criterion(layers, targets)), dict(criterion.weight_dict)
        losses = values(use_ranking_loss(criterion, box_weight=0.25)(layers, targets))
        assert losses["loss_bbox_0"] == pytest.approx(0.25 * own["loss_bbox_0"])
        assert losses["loss_giou"] == pytest.approx(0.25 * own["loss_giou"])
        assert criterion.weight_dict == weights

    @pytest.mark.parametrize("criterion_class", [VarifocalCriterion, MatchabilityCriterion])
    def test_criteria_that_weigh_their_losses_themselves(self, criterion_class):
        layers, targets = layers_and_targets()
        losses = values(use_ranking_loss(criterion_class())(layers, targets))
        for suffix, layer in zip(("", "_0"), layers, strict=True):
            ranking = ranking_of(layer["pred_logits"], expected_targets(layer, targets)).item()
            for key in (criterion_class.class_key, "loss_bbox", "loss_giou"):
                assert losses[key + suffix] == pytest.approx(2 * ranking, rel=1e-6)

    def test_ious_passed_as_values_are_not_the_labels(self):
        layers, targets = layers_and_targets()
        criterion = use_ranking_loss(VarifocalCriterion())
        indices = [(torch.tensor([0, 1]), torch.tensor([0, 1])), (torch.tensor([0]), torch.tensor([0]))]
        with_values = criterion.loss_labels_vfl(layers[0], targets, indices, 3.0, values=torch.zeros(3))
        torch.testing.assert_close(with_values, criterion.loss_labels_vfl(layers[0], targets, indices, 3.0))

    def test_a_match_without_overlap_stays_a_positive(self):
        layers, targets = layers_and_targets()
        targets[1]["boxes"] = torch.tensor([[0.05, 0.05, 0.01, 0.01]])
        losses = use_ranking_loss(SetCriterion())(layers, targets)
        expected = expected_targets(layers[0], targets)
        assert expected[1, 0, 1] == 1e-6
        torch.testing.assert_close(losses["loss_ce"], ranking_of(layers[0]["pred_logits"], expected))

    def test_an_object_that_is_padding_stays_a_negative(self):
        layers, targets = layers_and_targets()
        for target, valid in zip(targets, ([1, 0], [1]), strict=True):
            target["valid"] = torch.tensor(valid)
        losses = use_ranking_loss(SetCriterion())(layers, targets)
        expected = expected_targets(layers[0], targets)
        expected[0, 1, 0] = 0
        torch.testing.assert_close(losses["loss_ce"], ranking_of(layers[0]["pred_logits"], expected))

    def test_without_objects_all_gradients_are_zero(self):
        layers, _ = layers_and_targets()
        targets = [{"labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)}] * 2
        criterion = use_ranking_loss(SetCriterion(("labels", "boxes")))
        losses = criterion(layers, targets)
        torch.stack(
            [losses[key] * weight for key, weight in criterion.weight_dict.items() if key in losses]
        ).sum().backward()
        for layer in layers:
            assert gradient_of(layer["pred_logits"]).abs().max() == 0
        assert values(losses)["loss_ce"] == 0

    def test_only_the_ranking_has_a_gradient_at_the_logits(self):
        layers, targets = layers_and_targets()
        use_ranking_loss(SetCriterion(("labels", "boxes")))(layers, targets)["loss_ce"].backward()
        logits = layers[0]["pred_logits"].detach().requires_grad_()
        ranking_of(logits, expected_targets(layers[0], targets)).backward()
        torch.testing.assert_close(gradient_of(layers[0]["pred_logits"]), gradient_of(logits))
        assert layers[0]["pred_boxes"].grad is None  # the labels carry no gradient

    def test_bfloat16_under_autocast_is_ranked_in_float32(self):
        layers, targets = layers_and_targets()
        coarse = [{key: value.detach().bfloat16() for key, value in layer.items()} for layer in layers]
        with torch.autocast("cpu", torch.bfloat16):
            losses = use_ranking_loss(SetCriterion())(coarse, targets)
        assert losses["loss_ce"].dtype == torch.float32

    def test_deim_hides_nan(self):
        # docs/detr-criteria.md warns of this.
        layers, targets = layers_and_targets()
        layers[0]["pred_logits"] = torch.full_like(layers[0]["pred_logits"], torch.nan)
        assert torch.isnan(use_ranking_loss(VarifocalCriterion())(layers, targets)["loss_vfl"])
        assert use_ranking_loss(MatchabilityCriterion())(layers, targets)["loss_mal"] == 0

    @every_criterion
    def test_a_few_steps_lower_the_loss(self, criterion_class):
        layers, targets = layers_and_targets()
        criterion = use_ranking_loss(criterion_class())
        optimiser = torch.optim.Adam([value for layer in layers for value in layer.values()], 0.1)
        rankings = []
        for _ in range(30):
            losses = criterion(layers, targets)
            optimiser.zero_grad()
            sum(value for key, value in losses.items() if key.startswith("loss")).backward()
            optimiser.step()
            rankings.append([losses[criterion.class_key + suffix].item() for suffix in ("", "_0")])
        assert rankings[-1][0] < 0.5 * rankings[0][0]
        assert rankings[-1][1] < 0.5 * rankings[0][1]


class TestInPlace:
    @every_criterion
    def test_undo_restores_everything(self, criterion_class):
        layers, targets = layers_and_targets()
        criterion = criterion_class()
        own, attributes, weights = (
            values(criterion(layers, targets)),
            dict(vars(criterion)),
            dict(criterion.weight_dict),
        )
        assert use_ranking_loss(criterion) is criterion
        assert isinstance(criterion, criterion_class)
        assert values(criterion(layers, targets)) != own
        assert undo(criterion) is criterion
        assert type(criterion) is criterion_class
        assert vars(criterion) == attributes
        assert criterion.weight_dict == weights
        assert values(criterion(layers, targets)) == own

    def test_a_second_call_replaces_the_settings(self):
        layers, targets = layers_and_targets()
        criterion = use_ranking_loss(use_ranking_loss(SetCriterion()), loss="ap", box_weight=1)
        expected = use_ranking_loss(SetCriterion(), loss="ap", box_weight=1)
        assert values(criterion(layers, targets)) == values(expected(layers, targets))
        assert criterion.weight_dict == SetCriterion().weight_dict
        assert type(undo(criterion)) is SetCriterion

    def test_other_criteria_of_the_class_keep_their_loss(self):
        layers, targets = layers_and_targets()
        criterion, other = SetCriterion(), SetCriterion()
        own = values(other(layers, targets))
        use_ranking_loss(criterion)
        assert values(other(layers, targets)) == own

    @pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda c: pickle.loads(pickle.dumps(c))])
    @every_criterion
    def test_copies_and_pickles_keep_the_loss(self, clone, criterion_class):
        layers, targets = layers_and_targets()
        criterion = use_ranking_loss(criterion_class(), delta=0.3)
        expected = values(criterion(layers, targets))  # a copy after a step, whose values it holds
        copied = clone(criterion)
        assert type(copied) is type(criterion)
        assert values(copied(layers, targets)) == expected
        assert type(undo(copied)) is criterion_class
        assert type(criterion) is not criterion_class

    def test_torch_save(self):
        file = io.BytesIO()
        torch.save(use_ranking_loss(SetCriterion()), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert type(undo(loaded)) is SetCriterion

    def test_no_entry_in_the_state_dict(self):
        layers, targets = layers_and_targets()
        criterion = use_ranking_loss(SetCriterion())
        criterion(layers, targets)
        assert not criterion.state_dict()


class SoftmaxCriterion(SetCriterion):
    def __init__(self):
        super().__init__()
        self.register_buffer("empty_weight", torch.ones(4))


class OtherSignature(SetCriterion):
    def loss_boxes(self, outputs, indices, targets, num_boxes):  # type: ignore[override]
        return {}


class NoBoxes:
    losses = ("labels", "boxes")
    weight_dict = {"loss_ce": 1.0}  # noqa: RUF012

    def loss_labels(self, outputs, targets, indices, num_boxes):
        return {}


def without_weight(key):
    criterion = SetCriterion()
    del criterion.weight_dict[key]
    return criterion


class TestErrors:
    @pytest.mark.parametrize(
        ("criterion", "message"),
        [
            (nn.Linear(1, 1), r"a criterion whose losses are one of .*labels, then boxes, got \[\] of Linear"),
            (nn.DataParallel(SetCriterion()), "of DataParallel"),
            (None, "of NoneType"),
            (SetCriterion(["boxes", "labels"]), r"then boxes, got \['boxes', 'labels'\] of SetCriterion"),
            (SetCriterion(["labels", "vfl", "boxes"]), r"then boxes, got \['labels', 'vfl', 'boxes'\]"),
            (SetCriterion(["labels", "boxes", "keypoints"]), "losses without keypoints"),
            (SoftmaxCriterion(), "sigmoid scores, got a softmax with a no-object class"),
            (OtherSignature(), r"loss_boxes\(outputs, targets, .*got \(outputs, indices, targets, num_boxes\)"),
            (NoBoxes(), r"loss_boxes\(outputs, targets, indices, num_boxes\), got \(\)"),
            (VarifocalCriterion(["labels", "boxes"]), r"weight_dict with loss_ce, got \['loss_vfl',"),
            (without_weight("loss_ce_0"), r"weight_dict with loss_ce_0, got \['loss_ce', 'loss_bbox'"),
        ],
    )
    def test_unsupported(self, criterion, message):
        for function in (use_ranking_loss, undo):
            with pytest.raises(TypeError, match=f"{function.__name__}: expected .*{message}.*; see docs/detr-criteria"):
                function(criterion)

    @pytest.mark.parametrize("settings", [{"loss": "focal"}, {"method": "fast"}, {"delta": -1}, {"box_weight": -1}])
    def test_settings(self, settings):
        criterion = SetCriterion()
        with pytest.raises(ValueError, match=f"use_ranking_loss: expected {next(iter(settings))}"):
            use_ranking_loss(criterion, **settings)
        assert type(criterion) is SetCriterion

    def test_undo_without_a_ranking_loss(self):
        with pytest.raises(ValueError, match="undo: expected a criterion with a ranking loss, got SetCriterion"):
            undo(SetCriterion())
        with pytest.raises(ValueError, match="call use_ranking_loss first"):
            undo(undo(use_ranking_loss(SetCriterion())))


def test_the_adapter_is_short():
    assert len(Path(adapter.__file__).read_text().splitlines()) <= 150


@pytest.mark.slow
def test_the_adapter_imports_torch_alone():
    program = """
import sys
import bucketrank.integrations.set_criterion
print([name for name in ("rfdetr", "torchvision", "transformers", "ultralytics") if name in sys.modules])
"""
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"
