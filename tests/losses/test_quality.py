"""The score-based losses with IoU targets: against hand arithmetic, a slow reading of the papers, and transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketrank import (
    IoUAwareBCELoss,
    MALLoss,
    QualityFocalLoss,
    SoftBCELoss,
    VarifocalLoss,
    iou_aware_bce_loss,
    mal_loss,
    quality_focal_loss,
    soft_bce_loss,
    varifocal_loss,
)

LOSSES = (quality_focal_loss, varifocal_loss, soft_bce_loss, mal_loss, iou_aware_bce_loss)
MODULES: dict[Any, tuple[Callable[..., Tensor], dict[str, float]]] = {
    QualityFocalLoss: (quality_focal_loss, {"beta": 1.5}),
    VarifocalLoss: (varifocal_loss, {"alpha": 0.5, "gamma": 1.0}),
    SoftBCELoss: (soft_bce_loss, {}),
    MALLoss: (mal_loss, {"gamma": 2.0}),
    IoUAwareBCELoss: (iou_aware_bce_loss, {"alpha": 0.5, "gamma": 1.0}),
}
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)


def cross_entropy(p: float, q: float) -> float:
    return -q * math.log(p) - (1 - q) * math.log(1 - p)


def read_slowly(loss: Callable[..., Tensor], p: float, q: float) -> float:
    """Return the error of one entry by the formulas of the papers, with the default settings."""
    if loss is quality_focal_loss:
        return abs(q - p) ** 2 * cross_entropy(p, q)
    if loss is soft_bce_loss:
        return cross_entropy(p, q)
    if q > 0:
        positives: dict[Any, Callable[[], float]] = {
            varifocal_loss: lambda: q * cross_entropy(p, q),
            mal_loss: lambda: cross_entropy(p, q**1.5),
            iou_aware_bce_loss: lambda: cross_entropy(p, p**0.25 * q**0.75),
        }
        return positives[loss]()
    weights: dict[Any, float] = {varifocal_loss: 0.75 * p**2, mal_loss: p**1.5, iou_aware_bce_loss: p**2}
    return weights[loss] * cross_entropy(p, 0)


def mixed() -> tuple[Tensor, Tensor]:
    logits = torch.linspace(-4, 4, 24, dtype=torch.float64).reshape(2, 3, 4)
    targets = torch.zeros_like(logits)
    targets.view(-1)[[1, 7, 20]] = torch.tensor([0.9, 0.3, 1.0], dtype=torch.float64)
    targets.view(-1)[[2, 21]] = -1
    return logits, targets


@every_loss
def test_each_entry_equals_the_formula_of_the_paper(loss) -> None:
    logits, targets = mixed()
    got = loss(logits, targets, reduction="none")
    expected = [
        0.0 if q < 0 else read_slowly(loss, 1 / (1 + math.exp(-s)), q)
        for s, q in zip(logits.flatten().tolist(), targets.flatten().tolist(), strict=True)
    ]
    torch.testing.assert_close(got.flatten(), torch.tensor(expected, dtype=torch.float64))


@every_loss
def test_reductions(loss) -> None:
    logits, targets = mixed()
    total = loss(logits, targets, reduction="none").sum()
    torch.testing.assert_close(loss(logits, targets, reduction="sum"), total)
    divisor = 0.9 + 0.3 + 1.0 if loss is soft_bce_loss else 3
    torch.testing.assert_close(loss(logits, targets), total / divisor)
    without_positives = loss(logits, targets.clamp(max=0))
    torch.testing.assert_close(without_positives, loss(logits, targets.clamp(max=0), reduction="sum"))


@every_loss
def test_a_gradient_lowers_the_loss_and_leaves_ignored_entries_alone(loss) -> None:
    logits, targets = mixed()
    logits.requires_grad_()
    value = loss(logits, targets)
    (gradient,) = torch.autograd.grad(value, logits)
    assert (gradient[targets < 0] == 0).all()
    assert (gradient[targets == 0] > 0).all()
    assert loss((logits - 0.01 * gradient).detach(), targets) < value


@every_loss
def test_ignored_entries_may_be_anything_and_others_must_be_finite(loss) -> None:
    logits, targets = mixed()
    expected = loss(logits, targets)
    torch.testing.assert_close(loss(logits.masked_fill(targets < 0, torch.nan), targets), expected)
    for bad in (loss(logits.masked_fill(targets > 0, torch.nan), targets), loss(logits, targets.fill_(torch.nan))):
        assert bad.isnan()


@every_loss
def test_extreme_logits_stay_finite(loss) -> None:
    logits = torch.tensor([-200.0, 200.0, -200.0, 200.0], requires_grad=True)
    value = loss(logits, torch.tensor([0.8, 0.8, 0.0, 0.0]))
    value.backward()
    assert value.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@every_loss
def test_half_precision_is_computed_in_float32(loss) -> None:
    logits, targets = mixed()
    value = loss(logits.bfloat16(), targets.float())
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(logits.bfloat16().float(), targets.float()))


@every_loss
def test_invalid_input_is_explained(loss) -> None:
    name = loss.__name__
    with pytest.raises(ValueError, match=f"{name}: expected reduction to be one of mean, sum, none, got 'average'"):
        loss(torch.zeros(2), torch.zeros(2), reduction="average")
    with pytest.raises(ValueError, match=f"{name}: expected targets of shape"):
        loss(torch.zeros(2), torch.zeros(3))
    if loss in (varifocal_loss, mal_loss, iou_aware_bce_loss):
        with pytest.raises(ValueError, match=f"{name}: expected gamma to be a finite number of at least 0, got -1"):
            loss(torch.zeros(2), torch.zeros(2), gamma=-1)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_modules_are_their_functions(module) -> None:
    logits, targets = mixed()
    function, settings = MODULES[module]
    assert torch.equal(module(**settings)(logits, targets), function(logits, targets, **settings))
    assert torch.equal(module(reduction="sum")(logits, targets), function(logits, targets, reduction="sum"))
    for name, value in settings.items():
        assert f"{name}={value}" in repr(module(**settings))
    with pytest.raises(ValueError, match=f"{module.__name__}: expected reduction to be one of"):
        module(reduction="average")


class Outputs:
    """Queries of two images with matched boxes, in the form that the criteria of transformers take."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        centres = torch.rand(2, 6, 2, generator=random) * 0.4 + 0.3
        boxes = torch.cat([centres, torch.rand(2, 6, 2, generator=random) * 0.3 + 0.1], 2)
        self.logits = torch.randn(2, 6, 3, generator=random, requires_grad=True)
        objects = [boxes[0, [4, 1]] * 1.1, boxes[1, [2]] * 0.9]
        self.targets = [
            {"boxes": objects[0], "class_labels": torch.tensor([2, 0])},
            {"boxes": objects[1], "class_labels": torch.tensor([1])},
        ]
        self.indices = [(torch.tensor([4, 1]), torch.tensor([0, 1])), (torch.tensor([2]), torch.tensor([0]))]
        self.outputs = {"logits": self.logits, "pred_boxes": boxes}

    def iou_targets(self) -> Tensor:
        from torchvision.ops import box_convert, box_iou

        targets = torch.zeros_like(self.logits)
        for image, (queries, numbers) in enumerate(self.indices):
            predicted = box_convert(self.outputs["pred_boxes"][image, queries], "cxcywh", "xyxy")
            objects = box_convert(self.targets[image]["boxes"][numbers], "cxcywh", "xyxy")
            labels = self.targets[image]["class_labels"][numbers]
            targets[image, queries, labels] = box_iou(predicted, objects).diag()
        return targets.detach()


def criterion_of(module: str, name: str, **attributes: Any) -> Any:
    """Return a criterion of transformers with nothing but the attributes that its class loss reads."""
    library = pytest.importorskip(f"transformers.loss.{module}")
    criterion = getattr(library, name).__new__(getattr(library, name))
    torch.nn.Module.__init__(criterion)
    for key, value in attributes.items():
        setattr(criterion, key, value)
    return criterion


@pytest.mark.slow
def test_varifocal_has_the_value_of_transformers() -> None:
    queries = Outputs()
    criterion = criterion_of("loss_rt_detr", "RTDetrLoss", num_classes=3, alpha=0.75, gamma=2.0)
    theirs = criterion.loss_labels_vfl(queries.outputs, queries.targets, queries.indices, num_boxes=3)["loss_vfl"]
    torch.testing.assert_close(varifocal_loss(queries.logits, queries.iou_targets()), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mal", "iou_aware_bce"])
def test_value_and_gradient_of_transformers(loss: str) -> None:
    queries = Outputs()
    arguments = queries.outputs, queries.targets, queries.indices
    if loss == "mal":
        criterion = criterion_of("loss_deimv2", "Deimv2Loss", num_classes=3, gamma=1.5, mal_alpha=None)
        theirs = criterion.loss_labels_mal(*arguments, num_boxes=3)["loss_mal"]
        ours = mal_loss(queries.logits, queries.iou_targets())
    else:
        criterion = criterion_of("loss_lw_detr", "LwDetrImageLoss", num_classes=3, focal_alpha=0.25)
        theirs = criterion.loss_labels(*arguments, num_boxes=3)["loss_ce"]
        ours = iou_aware_bce_loss(queries.logits, queries.iou_targets())
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(value, queries.logits)[0] for value in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_a_gamma_of_0_leaves_the_target_of_a_negative_at_0() -> None:
    value = mal_loss(torch.tensor([-3.0]), torch.tensor([0.0]), gamma=0.0)
    torch.testing.assert_close(value, torch.tensor(cross_entropy(1 / (1 + math.exp(3)), 0)))


@pytest.mark.parametrize(
    "loss",
    [partial(quality_focal_loss, beta=0.5), partial(varifocal_loss, gamma=0.5), partial(iou_aware_bce_loss, gamma=0.5)],
    ids=["qfl", "vfl", "iabce"],
)
def test_an_exponent_below_1_has_a_finite_gradient_everywhere(loss) -> None:
    logits = torch.tensor([-200.0, 200.0, 0.0, 0.0], requires_grad=True)
    loss(logits, torch.tensor([0.0, 1.0, 0.5, 0.0])).backward()  # the third score equals its target
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[3] > 0
