"""The mask loss of Mask R-CNN: every choice by hand, and the published choices of every loss."""

import math
from dataclasses import replace

import pytest
import torch

from bucketrank.detectors import build
from bucketrank.detectors.criterion import HeadRecipe, build_criterion
from bucketrank.detectors.mask_rcnn import MaskLoss, MaskRCNN
from bucketrank.settings import loss_settings
from bucketrank.settings.detector_specs import MaskRCNNSettings

from .small_detectors import scene, small_detector

# Two masks of 2 x 2 pixels. Every probability of the first is 1/2; of the second, 3/4.
LOGITS = torch.stack([torch.zeros(2, 2), torch.full((2, 2), math.log(3))])
TARGETS = torch.tensor([[[1.0, 0], [1, 0]], [[1, 0], [0, 0]]])
DICE = (
    1 - 2 * (2 * 1 / 2) / (4 * 1 / 4 + 2),  # 1/3
    1 - 2 * (1 * 3 / 4) / (4 * 9 / 16 + 1),  # 7/13
)
BCE = (
    math.log(2),
    (math.log(4 / 3) + 3 * math.log(4)) / 4,
)
# The highest scores of the two positives are 1/2 and 4/5.
CLASS_LOGITS = torch.tensor([[0.0, -1.0], [-2.0, math.log(4)]])
SCORES = (1 / 2, 4 / 5)
RANK_SORT = {"rank": torch.tensor(0.5), "sort": torch.tensor(0.25), "box": torch.tensor(9.0)}
CROSS_ENTROPY = {"cls": torch.tensor(0.6), "box": torch.tensor(9.0)}
TERMS = {"rs": RANK_SORT, "rsq": RANK_SORT | {"qfl": torch.tensor(0.125)}, "ce": CROSS_ENTROPY}


def criterion_of(loss, **recipe):
    return build_criterion(loss_settings(loss), HeadRecipe(**recipe))


def value_of(loss, class_logits=CLASS_LOGITS, **settings):
    """Return the loss of the two masks in a box head that is trained with ``loss``."""
    criterion = criterion_of(loss, softmax=class_logits.shape[1] == 3)
    mask_loss = MaskLoss.from_settings(MaskRCNNSettings(**settings), criterion)
    return mask_loss(LOGITS, TARGETS, class_logits=class_logits, terms=TERMS[loss], criterion=criterion)


def weighted(values, weights):
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


@pytest.mark.parametrize("loss", ["rs", "ce"])
@pytest.mark.parametrize(("mask_loss", "errors"), [("dice", DICE), ("bce", BCE)])
@pytest.mark.parametrize(("mask_confidence", "weights"), [(False, (1, 1)), (True, SCORES)])
@pytest.mark.parametrize(("mask_weight", "factor"), [(None, 1.0), (0.5, 0.5), (0.0, 0.0)])
def test_a_mean_over_the_positives_times_the_weight(
    loss, mask_loss, errors, mask_confidence, weights, mask_weight, factor
):
    value = value_of(
        loss, mask_loss=mask_loss, mask_balance=False, mask_confidence=mask_confidence, mask_weight=mask_weight
    )
    # Dice loss adds 1e-5 to its denominator.
    torch.testing.assert_close(value, torch.tensor(factor * weighted(errors, weights)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask_loss", ["dice", "bce"])
@pytest.mark.parametrize(("loss", "classification"), [("rs", 0.5 + 0.25), ("rsq", 0.5 + 0.25 + 0.125), ("ce", 0.6)])
def test_a_balanced_loss_has_the_value_of_the_classification_terms(loss, classification, mask_loss):
    """The box term does not count."""
    value = value_of(loss, mask_loss=mask_loss, mask_balance=True)
    torch.testing.assert_close(value, torch.tensor(classification))


def test_a_weight_replaces_the_balance():
    weighted_loss, balanced = value_of("rs", mask_weight=3.0), value_of("rs", mask_balance=False)
    torch.testing.assert_close(weighted_loss, 3 * balanced)


def test_balance_scales_the_gradient_and_sends_none_to_the_classification():
    criterion = criterion_of("rs")
    gradients = []
    terms = {name: term.clone().requires_grad_() for name, term in RANK_SORT.items()}
    class_logits = CLASS_LOGITS.clone().requires_grad_()
    for balance in (False, True):
        logits = LOGITS.clone().requires_grad_()
        mask_loss = MaskLoss.from_settings(MaskRCNNSettings(mask_balance=balance), criterion)
        mask_loss(logits, TARGETS, class_logits=class_logits, terms=terms, criterion=criterion).backward()
        assert logits.grad is not None
        gradients.append(logits.grad)
    torch.testing.assert_close(gradients[1], gradients[0] * 0.75 / weighted(DICE, SCORES), rtol=1e-4, atol=1e-6)
    assert class_logits.grad is None
    assert all(term.grad is None for term in terms.values())


def test_confidence_with_a_softmax_leaves_the_background_out():
    class_logits = torch.tensor([[math.log(2), 0, math.log(7)], [math.log(6), math.log(3), 0]])  # 0.2 and 0.6
    value = value_of("ce", class_logits, mask_confidence=True)
    torch.testing.assert_close(value, torch.tensor(weighted(BCE, (0.2, 0.6))))


RANKING = MaskLoss("dice", balance=False, confidence=True, weight=1.0)
BALANCED = replace(RANKING, balance=True)
SCORED = MaskLoss("bce", balance=False, confidence=False, weight=1.0)


@pytest.mark.parametrize(
    ("loss", "published"),
    [
        ("rs", BALANCED),
        ("rsq", BALANCED),
        *((loss, RANKING) for loss in ("ap", "alrp", "dr")),
        *((loss, SCORED) for loss in ("ce", "focal", "qfl", "vfl", "bce", "mal", "iabce")),
    ],
)
def test_the_published_choices(loss, published):
    assert MaskLoss.from_settings(MaskRCNNSettings(), criterion_of(loss)) == published


def test_box_balance_does_not_change_the_masks():
    criterion = build_criterion(loss_settings("rs", box_balance=False), HeadRecipe())
    assert MaskLoss.from_settings(MaskRCNNSettings(), criterion).balance


def test_values_of_the_published_choices():
    torch.testing.assert_close(value_of("rs"), torch.tensor(0.75))
    torch.testing.assert_close(value_of("ce"), torch.tensor(weighted(BCE, (1, 1))))


def step(loss, **settings):
    """Return the terms of one step of Mask R-CNN, with the same weights, images and draws in every call."""
    model = small_detector("mask_rcnn", loss=loss, **settings)
    torch.manual_seed(0)
    return model(*scene())


@pytest.mark.parametrize(
    ("loss", "published"),
    [
        ("rs", {"mask_loss": "dice", "mask_balance": True, "mask_confidence": True}),
        ("ce", {"mask_loss": "bce", "mask_balance": False, "mask_confidence": False, "mask_weight": 1.0}),
    ],
)
def test_mask_rcnn_has_the_published_loss_by_default(loss, published):
    torch.testing.assert_close(step(loss), step(loss, **published), rtol=0, atol=0)


def test_settings_of_mask_rcnn_change_the_mask_term_alone():
    default, changed = step("rs"), step("rs", mask_loss="bce", mask_balance=False, mask_weight=0.0)
    assert changed.pop("mask") == 0
    assert default.pop("mask") > 0
    torch.testing.assert_close(changed, default, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_loss": "focal"}, "detector.mask_loss: expected one of dice, bce, got 'focal'"),
        (
            {"mask_weight": 2.0, "mask_balance": True},
            "detector.mask_weight: expected null with detector.mask_balance true",
        ),
        ({"mask_weight": -1.0}, "detector.mask_weight: expected a finite number of at least 0, got -1.0"),
        ({"mask_weight": math.inf}, "detector.mask_weight: expected a finite number of at least 0, got inf"),
        ({"mask_weight": math.nan}, "detector.mask_weight: expected a finite number of at least 0, got nan"),
    ],
)
def test_invalid_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        MaskRCNNSettings(**settings)


@pytest.mark.parametrize("loss", ["rs", "ce"])
@pytest.mark.parametrize("name", ["dice", "bce"])
@pytest.mark.parametrize("confidence", [False, True])
def test_without_positives_the_loss_is_zero_and_has_a_gradient(loss, name, confidence):
    criterion = criterion_of(loss)
    mask_loss = MaskLoss.from_settings(MaskRCNNSettings(mask_loss=name, mask_confidence=confidence), criterion)
    logits = torch.zeros(0, 2, 2, requires_grad=True)
    value = mask_loss(logits, TARGETS[:0], class_logits=CLASS_LOGITS[:0], terms=TERMS[loss], criterion=criterion)
    value.backward()
    assert value == 0
    assert logits.grad is not None


@pytest.mark.parametrize("classes", [1, 80])
def test_the_first_masks_are_not_saturated(classes):
    """Torchvision's initial weights give one class logits of about 10, where the Dice loss has no gradient."""
    detector = build("mask_rcnn", num_classes=classes, backbone="test_resnet", channels=32, hidden=32, loss="rs")
    assert isinstance(detector, MaskRCNN)
    with torch.no_grad():
        probabilities = detector.mask_head(torch.rand(4, 32, 14, 14)).sigmoid()
    assert float((probabilities - 0.5).abs().max()) < 0.2
