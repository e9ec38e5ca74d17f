"""Modules and self-balancing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bucketrank import (
    ALRPLoss,
    APLoss,
    DRLoss,
    RankSortLoss,
    alrp_loss,
    ap_loss,
    dr_loss,
    rank_sort_loss,
    self_balance,
)

from .cases import synthetic, total


def test_modules_are_their_functions() -> None:
    logits, targets = synthetic(200, 20)
    boxes = torch.rand(20)
    settings: dict[str, Any] = {"delta": 0.25, "method": "bucketed"}
    assert torch.equal(APLoss(**settings)(logits, targets), ap_loss(logits, targets, **settings))
    interpolated = APLoss(delta=0.3, interpolate=True)(logits, targets)
    assert torch.equal(interpolated, ap_loss(logits, targets, delta=0.3, interpolate=True))
    assert torch.equal(RankSortLoss(**settings)(logits, targets), total(rank_sort_loss(logits, targets, **settings)))
    assert torch.equal(
        ALRPLoss(delta=0.25)(logits, targets, boxes), total(alrp_loss(logits, targets, boxes, delta=0.25))
    )
    assert torch.equal(DRLoss(margin=0.2)(logits, targets), dr_loss(logits, targets, margin=0.2))


def test_modules_show_their_settings() -> None:
    assert repr(APLoss(delta=2)) == "APLoss(delta=2, method='exact', interpolate=False)"
    assert repr(RankSortLoss(method="pairwise")) == "RankSortLoss(delta=0.5, method='pairwise')"
    assert repr(ALRPLoss()) == "ALRPLoss(delta=1.0, method='exact')"
    assert "margin=0.5" in repr(DRLoss())


def test_modules_refuse_wrong_settings_when_made() -> None:
    with pytest.raises(ValueError, match="APLoss: expected delta to be a finite number of at least 0, got -1"):
        APLoss(delta=-1)
    with pytest.raises(ValueError, match="RankSortLoss: expected method to be one of"):
        RankSortLoss(method="quick")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ALRPLoss: expected method to be one of exact, pairwise, got 'bucketed'"):
        ALRPLoss(method="bucketed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="DRLoss: expected weight to be a finite number above 0, got -4"):
        DRLoss(weight=-4)


def test_self_balance_takes_the_value_and_scales_the_gradient() -> None:
    box, rank = torch.tensor(0.25, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    balanced = self_balance(box * 2, to=rank * 3)
    balanced.backward()
    assert balanced.item() == 6
    assert box.grad is not None
    assert box.grad.item() == 2 * 6 / 0.5
    assert rank.grad is None


def test_self_balance_of_zero() -> None:
    box = torch.zeros((), requires_grad=True)
    balanced = self_balance(box, to=torch.tensor(3.0))
    balanced.backward()
    assert balanced.item() == 0
    assert box.grad is not None
    assert box.grad.item() == 1
    nothing = torch.tensor(2.0, requires_grad=True)
    assert self_balance(nothing, to=torch.tensor(0.0)).item() == 0


def test_self_balance_of_float16_whose_ratio_exceeds_its_range() -> None:
    box = torch.tensor(1e-5, dtype=torch.float16, requires_grad=True)
    balanced = self_balance(box, to=torch.tensor(1.0, dtype=torch.float16))
    assert balanced.item() == pytest.approx(1.0, rel=1e-3)


def test_self_balance_refuses_more_than_one_value() -> None:
    with pytest.raises(TypeError, match=r"self_balance: expected loss to be a tensor with one value, got shape \(3,\)"):
        self_balance(torch.zeros(3), to=torch.zeros(()))
    with pytest.raises(TypeError, match="self_balance: expected to to be a tensor with one value, got float"):
        self_balance(torch.zeros(()), to=1.0)  # type: ignore[arg-type]
