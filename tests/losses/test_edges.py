"""Inputs at the edge of what is allowed, and beyond: the same behaviour for every method and backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bucketrank import alrp_loss, ap_loss, dr_loss, rank_sort_loss

from .cases import (
    EVERY,
    FAITHFUL,
    LOSSES,
    RANKING,
    Way,
    answer,
    assert_same,
    hard_inputs,
    identify,
    pairs,
    total,
    use_backend,
)
from .oracle import Answer

every_way = pytest.mark.parametrize("way", EVERY, ids="-".join)
every_loss = pytest.mark.parametrize(("name", "way"), pairs(), ids=identify)
every_ranking_loss = pytest.mark.parametrize(("name", "way"), pairs(RANKING), ids=identify)


@every_ranking_loss
@pytest.mark.parametrize(
    "targets", [torch.zeros(6), -torch.ones(6), torch.tensor([0.0, -1.0] * 3)], ids=["negatives", "ignored", "both"]
)
def test_without_positives_all_is_zero_and_attached(targets: torch.Tensor, name: str, way: Way) -> None:
    logits = torch.randn(6, requires_grad=True)
    with use_backend(way[1]):
        terms = LOSSES[name].compute(logits, targets, method=way[0])
    for term in terms:
        assert term.requires_grad
        assert term.shape == ()
        assert term.item() == 0
    total(terms).backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [0.0] * 6


@every_loss
def test_empty_input(name: str, way: Way) -> None:
    logits = torch.empty(0, 80, requires_grad=True)
    with use_backend(way[1]):
        terms = LOSSES[name].compute(logits, torch.empty(0, 80), method=way[0])
    total(terms).backward()
    assert [term.item() for term in terms] == [0] * len(terms)
    assert logits.grad is not None
    assert logits.grad.shape == (0, 80)


@every_loss
def test_strange_memory_layouts(name: str, way: Way) -> None:
    torch.manual_seed(0)
    loss = LOSSES[name].compute
    logits, targets = torch.randn(30, 4), torch.where(torch.rand(30, 4) < 0.3, torch.rand(30, 4), 0.0)
    expected = answer(loss, logits.flatten(), targets.flatten(), delta=0.5, way=way)
    shaped = [gradient.reshape(30, 4) for gradient in expected.gradients]
    transposed = answer(loss, logits.t().contiguous().t(), targets, delta=0.5, way=way)
    assert_same(transposed, expected._replace(gradients=shaped))
    twice = torch.stack([logits, logits], -1).requires_grad_()
    with use_backend(way[1]):
        terms = loss(twice[..., 1], targets.double(), delta=0.5, method=way[0])  # every second number in memory
        gradients = [torch.autograd.grad(term, twice, retain_graph=True)[0][..., 1] for term in terms]
    assert_same(Answer([term.detach() for term in terms], gradients), expected._replace(gradients=shaped))

    # A row seen five times: its gradient is the sum over the five.
    row = logits[0].clone().requires_grad_()
    rows = row.detach().expand(5, 4).clone()
    expected = answer(loss, rows, targets[:5], delta=0.5, way=way)
    with use_backend(way[1]):
        terms = loss(row.expand(5, 4), targets[:5], delta=0.5, method=way[0])
        gradients = [torch.autograd.grad(term, row, retain_graph=True)[0] for term in terms]
    for ours, theirs in zip(gradients, expected.gradients, strict=True):
        torch.testing.assert_close(ours, theirs.sum(0), atol=1e-6, rtol=1e-5)


@every_loss
@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        *((where, wrong) for where in ("a positive", "a negative") for wrong in (math.nan, math.inf, -math.inf)),
        *(("a target", wrong) for wrong in (math.nan, math.inf)),  # a target of -inf is below 0: ignored
    ],
)
def test_what_is_not_finite_makes_all_of_it_nan(where: str, wrong: float, name: str, way: Way) -> None:
    logits = torch.tensor([0.5, -0.2, 0.1, 2.0, -3.0])
    targets = torch.tensor([0.3, 0.9, 0.0, -1.0, 0.0])
    broken = targets if where == "a target" else logits
    broken[{"a positive": 1, "a negative": 4, "a target": 0}[where]] = wrong
    got = answer(LOSSES[name].compute, logits, targets, delta=0.5, way=way)
    for value, gradient in zip(got.values, got.gradients, strict=True):
        assert value.isnan()
        assert gradient.isnan().tolist() == [True, True, True, False, True]
        assert gradient[3] == 0


@every_loss
def test_a_negative_that_is_not_finite_shows_without_positives_too(name: str, way: Way) -> None:
    got = answer(LOSSES[name].compute, torch.tensor([1.0, math.nan]), torch.zeros(2), delta=0.5, way=way)
    assert all(value.isnan() for value in got.values)


@every_loss
def test_what_is_ignored_may_be_anything(name: str, way: Way) -> None:
    logits = torch.tensor([0.5, -0.2, 0.1, math.nan, -3.0, math.inf])
    targets = torch.tensor([0.3, 0.9, 0.0, -1.0, 0.0, -math.inf])
    loss, kept = LOSSES[name].compute, targets >= 0
    got = answer(loss, logits, targets, delta=0.5, way=way)
    expected = answer(loss, logits[kept], targets[kept], delta=0.5, way=way)
    assert [gradient[~kept].tolist() for gradient in got.gradients] == [[0.0, 0.0]] * len(got.gradients)
    assert_same(got._replace(gradients=[gradient[kept] for gradient in got.gradients]), expected)


@every_way
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype, way: Way) -> None:
    logits, targets = hard_inputs()["plain"]
    logits = logits.to(dtype)
    loss = LOSSES["rank_sort"].compute
    got = answer(loss, logits, targets.to(dtype), delta=0.5, way=way)
    assert [value.dtype for value in got.values] == [torch.promote_types(dtype, torch.float32)] * 2
    assert [gradient.dtype for gradient in got.gradients] == [dtype] * 2
    # Half-precision logits are computed in full; only the gradient is rounded in the end.
    expected = answer(loss, logits.double(), targets.to(dtype).double(), delta=0.5, way=way)
    assert_same(got, expected, relative=max(1e-6, torch.finfo(dtype).eps))


@every_way
def test_integer_and_boolean_targets(way: Way) -> None:
    logits = torch.randn(20)
    targets = torch.arange(20).remainder(4) - 1
    loss = LOSSES["ap"].compute
    expected = answer(loss, logits, targets.float(), delta=1.0, way=way)
    assert_same(answer(loss, logits, targets, delta=1.0, way=way), expected)
    positive = answer(loss, logits, targets > 0, delta=1.0, way=way)
    assert_same(positive, answer(loss, logits, (targets > 0).float(), delta=1.0, way=way))


def test_a_tiny_float64_label_stays_a_positive() -> None:
    logits, targets = torch.tensor([0.0, 1.0]), torch.tensor([1e-60, 0.0], dtype=torch.float64)
    assert ap_loss(logits, targets, delta=0).item() == 0.5


@pytest.mark.parametrize("loss", [ap_loss, rank_sort_loss])
def test_errors_say_what_was_expected_and_what_came(loss) -> None:
    name, logits = loss.__name__, torch.zeros(1000)
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (
            (logits, torch.zeros(998)),
            {},
            ValueError,
            f"{name}: expected targets of shape (1000,) like logits, got (998,)",
        ),
        ((logits.long(), logits), {}, TypeError, f"{name}: expected logits of a float dtype, got torch.int64"),
        ((logits, logits.to(torch.complex64)), {}, TypeError, f"{name}: expected real targets, got torch.complex64"),
        (([0.0], logits), {}, TypeError, f"{name}: expected logits to be a tensor, got list"),
        ((logits, None), {}, TypeError, f"{name}: expected targets to be a tensor, got NoneType"),
        ((logits, logits.to("meta")), {}, ValueError, f"{name}: expected targets on cpu like logits, got meta"),
        (
            (logits, logits),
            {"delta": -0.1},
            ValueError,
            f"{name}: expected delta to be a finite number of at least 0, got -0.1",
        ),
        ((logits, logits), {"delta": math.nan}, ValueError, "got nan"),
        ((logits, logits), {"delta": math.inf}, ValueError, "got inf"),
        ((logits, logits), {"delta": True}, ValueError, "got True"),
        ((logits, logits), {"delta": "1"}, ValueError, "got '1'"),
        (
            (logits, logits),
            {"method": "fast"},
            ValueError,
            f"{name}: expected method to be one of exact, bucketed, pairwise, got 'fast'",
        ),
    ]
    for args, kwargs, kind, message in cases:
        with pytest.raises(kind) as error:
            loss(*args, **kwargs)
        assert message in str(error.value)


def test_errors_of_alrp() -> None:
    logits, targets = torch.zeros(4), torch.tensor([1.0, 1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="expected method to be one of exact, pairwise, got 'bucketed'"):
        alrp_loss(logits, targets, torch.zeros(2), method="bucketed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected one localisation error for each .* 2 of them, got 3"):
        alrp_loss(logits, targets, torch.zeros(3))
    with pytest.raises(ValueError, match=r"expected localisation of one dimension.*got shape \(2, 1\)"):
        alrp_loss(logits, targets, torch.zeros(2, 1))
    with pytest.raises(TypeError, match="expected localisation to be a tensor of floats, got list"):
        alrp_loss(logits, targets, [0.1, 0.2])  # type: ignore[arg-type]


def test_errors_of_dr() -> None:
    with pytest.raises(ValueError, match="dr_loss: expected smoothing to be a finite number above 0, got 0"):
        dr_loss(torch.zeros(1), torch.zeros(1), smoothing=0)
    for wrong in ("a", True, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"dr_loss: expected margin to be a finite number, got {wrong!r}"):
            dr_loss(torch.zeros(1), torch.zeros(1), margin=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dr_loss: expected targets of shape"):
        dr_loss(torch.zeros(1), torch.zeros(2))


@pytest.mark.parametrize("targets", [torch.zeros(3), torch.ones(3), -torch.ones(3), torch.zeros(0)])
def test_dr_without_positives_or_negatives(targets: torch.Tensor) -> None:
    logits = torch.zeros_like(targets, requires_grad=True)
    loss = dr_loss(logits, targets)
    loss.backward()
    if (targets == 0).any():
        # p+ is 1, p- a half: 4 ln(1 + e^0) / 6
        torch.testing.assert_close(loss.item(), 4 * math.log(2) / 6)
    else:
        assert loss.item() == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", FAITHFUL, ids="-".join)
def test_localisation_errors_get_a_gradient_where_there_is_nothing_to_rank(way: Way, compiled: bool) -> None:
    """Without positives the gradient at the errors is empty; next to a logit of NaN it is NaN."""

    def train(logits: torch.Tensor, targets: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        return total(alrp_loss(logits, targets, boxes * 2, method=way[0]))

    if compiled:
        train = torch.compile(train, fullgraph=True, backend="aot_eager")
    for targets, logits, expected in (
        (torch.zeros(3), torch.zeros(3), torch.zeros(0)),
        (torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, math.nan, 1.0]), torch.full((2,), math.nan)),
    ):
        boxes = torch.zeros(len(expected), requires_grad=True)
        with use_backend(way[1]):
            train(logits.requires_grad_(), targets, boxes).backward()
        torch.testing.assert_close(boxes.grad, expected, equal_nan=True)


@pytest.mark.parametrize("method", ["exact", "bucketed", "pairwise"])
def test_a_delta_that_float32_cannot_hold_still_ties_at_one_half(method) -> None:
    logits, targets = torch.tensor([0.0, 0.0, 3.0]), torch.tensor([1.0, 0.0, 0.0])
    value = ap_loss(logits, targets, delta=1e-46, method=method)
    torch.testing.assert_close(value, ap_loss(logits, targets, delta=1e-30, method=method))
    assert value.isfinite()
