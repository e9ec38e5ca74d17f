"""The criteria of the losses with IoU targets, the hybrid, and settings that leave the loss as the only difference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.ops import generalized_box_iou_loss

from bucketrank import (
    iou_aware_bce_loss,
    mal_loss,
    quality_focal_loss,
    rank_sort_loss,
    soft_bce_loss,
    varifocal_loss,
)
from bucketrank.detectors.criterion import HeadRecipe

from .small_detectors import small_detector
from .test_criterion import BOXES, CONFIDENCES, IOUS, LOGITS, OBJECTS, criterion, example, targets

LOSSES: dict[str, tuple[Callable[..., Tensor], dict[str, float], dict[str, float], Tensor]] = {
    "qfl": (quality_focal_loss, {"quality_beta": 1.5}, {"beta": 1.5}, CONFIDENCES),
    "vfl": (
        varifocal_loss,
        {"varifocal_alpha": 0.5, "varifocal_gamma": 1.0},
        {"alpha": 0.5, "gamma": 1.0},
        IOUS,
    ),
    "bce": (soft_bce_loss, {}, {}, IOUS),
    "mal": (mal_loss, {"mal_gamma": 2.0}, {"gamma": 2.0}, torch.ones(2)),
    "iabce": (
        iou_aware_bce_loss,
        {"iabce_alpha": 0.5, "iabce_gamma": 1.0},
        {"alpha": 0.5, "gamma": 1.0},
        torch.ones(2),
    ),
}
GIOU = generalized_box_iou_loss(BOXES, OBJECTS)


@pytest.mark.parametrize("name", LOSSES)
def test_terms_are_the_loss_and_the_weighted_boxes(name):
    function, settings, arguments, weights = LOSSES[name]
    terms = criterion(name, HeadRecipe(box_loss="l1", scored_box_weight=2.0), **settings)(example())
    torch.testing.assert_close(terms["cls"], function(LOGITS, targets(IOUS), **arguments))
    torch.testing.assert_close(terms["box"], 2 * (GIOU * weights).sum() / weights.sum())
    assert set(terms) == {"cls", "box"}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_plain_list_is_that_of_the_function(name):
    function, settings, arguments, _ = LOSSES[name]
    got = criterion(name, **settings).list_loss(LOGITS.flatten(), targets(IOUS).flatten())
    torch.testing.assert_close(got, function(LOGITS, targets(IOUS), **arguments))


def test_the_hybrid_adds_quality_focal_loss_to_rs():
    loss = criterion("rsq", delta=0.25, quality_beta=1.5)
    terms = loss(example())
    ranking, sorting = rank_sort_loss(LOGITS, targets(IOUS), delta=0.25)
    quality = quality_focal_loss(LOGITS, targets(IOUS), beta=1.5)
    expected = {"rank": ranking, "sort": sorting, "qfl": quality, "box": ranking + sorting}
    torch.testing.assert_close({name: term.detach() for name, term in terms.items()}, expected)
    plain = loss.list_loss(LOGITS.flatten(), targets(IOUS).flatten())
    torch.testing.assert_close(plain, ranking + sorting + quality)
    assert loss.classification_terms == ("rank", "sort", "qfl")


@pytest.mark.parametrize("name", ["rs", "ap", "dr", "focal", "ce", "qfl", "vfl", "bce", "mal", "iabce", "rsq"])
def test_boxes_can_have_the_same_weights_with_every_loss(name):
    for confident, weights in ((True, CONFIDENCES), (False, torch.ones(2))):
        settings = {"box_loss": "giou", "box_confidence": confident}
        for balance in (False, None):  # a fixed weight replaces the balance
            fixed = criterion(name, box_balance=balance, box_weight=2.0, **settings)(example())
            torch.testing.assert_close(fixed["box"], 2 * (GIOU * weights).sum() / weights.sum())
        loss = criterion(name, box_balance=True, **settings)
        terms = loss(example())
        balanced_to = [term for key, term in terms.items() if key in loss.classification_terms and key != "qfl"]
        torch.testing.assert_close(terms["box"], sum(balanced_to))


def test_alrp_has_its_own_balance():
    with pytest.raises(ValueError, match=r"loss\.box_balance: expected null: aLRP loss balances .* got True"):
        criterion("alrp", box_balance=True)
    with pytest.raises(ValueError, match=r"loss\.box_weight: expected null: aLRP loss balances .* got 2.0"):
        criterion("alrp", box_weight=2.0)


@pytest.mark.parametrize("name", ["rs", "focal"])
def test_a_box_loss_is_balanced_or_has_a_weight(name):
    with pytest.raises(ValueError, match=r"loss\.box_weight: expected null with loss\.box_balance true, got 2.0"):
        criterion(name, box_balance=True, box_weight=2.0)


@pytest.mark.parametrize("name", ["focal", "ce", "qfl", "vfl", "bce", "mal", "iabce"])
def test_a_score_based_loss_has_no_ranking_by_image(name):
    with pytest.raises(ValueError, match=r"loss\.ranking_scope: expected batch or global, .* got 'image'"):
        criterion(name, ranking_scope="image")


@pytest.mark.parametrize("name", ["atss", "paa"])
def test_the_quality_branch_is_built_for_losses_that_do_not_see_the_iou(name):
    losses = ("focal", "qfl", "rs", "rsq")
    assert [small_detector(name, loss=loss).head.quality is not None for loss in losses] == [True, False, False, False]
    assert small_detector(name, loss="focal", quality_branch=False).head.quality is None
    with pytest.raises(ValueError, match=r"detector\.quality_branch: expected null or false .*rs, got true"):
        small_detector(name, loss="rs", quality_branch=True)


def test_detectors_can_differ_by_the_loss_alone():
    same: dict[str, Any] = {"anchors": 3, "quality_branch": False, "box_loss": "giou", "box_confidence": True}
    shapes = [
        {key: tensor.shape for key, tensor in small_detector("atss", loss=loss, **same).state_dict().items()}
        for loss in ("rs", "ap", "focal", "qfl", "vfl", "bce", "rsq")
    ]
    assert all(each == shapes[0] for each in shapes)
