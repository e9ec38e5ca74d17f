"""Where ranking losses meet autograd: a forward that also prepares the gradient, a backward that spreads it.

A ranking loss has no derivative to take: its gradient is *defined* (identity update). Eager calls go through an
``autograd.Function``; ``torch.compile`` traces the same three functions as the custom op ``bucketrank::rank``, whose
dispatch would cost small inputs a tenth of a millisecond more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bucketrank.losses.backend import chosen_backend, comparison_of
from bucketrank.losses.comparison import precise
from bucketrank.losses.pairwise import Pairwise
from bucketrank.losses.terms import alrp, average_precision, interpolated_average_precision, rank_sort

LOSSES = {"ap": average_precision, "interpolated_ap": interpolated_average_precision, "rs": rank_sort}


def rank(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, loss: str, method: str, delta: float
) -> tuple[Tensor, Tensor]:
    """The two values of a ranking loss; ``logits`` and ``targets`` are flat, contiguous and of one dtype."""
    # Read here, so that the backward pass, wherever it is called, does as the forward pass did.
    arguments = logits, targets, localisation, loss, method, chosen_backend(), delta
    if torch.compiler.is_compiling():
        first, second, *_ = _rank_op(*arguments)
    else:
        first, second = _Rank.apply(*arguments)
    return first, second


def _forward(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, loss: str, method: str, backend: str, delta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    comparison = comparison_of(method, backend, logits)(logits, targets, delta)
    index = comparison.index
    if localisation is not None and localisation.numel() != index.numel():
        raise ValueError(
            "alrp_loss: expected one localisation error for each of logits[targets > 0], "
            f"{index.numel()} of them, got {localisation.numel()}"
        )
    if not comparison.finite or index.numel() == 0:
        value = logits.new_full((), 0.0 if comparison.finite else torch.nan)
        return value, value.clone(), index[:0], precise(logits.new_zeros(0, 3 if localisation is None else 4))
    if not comparison.resolves():
        comparison = Pairwise(logits, targets, delta, index)
    if localisation is None:
        terms = LOSSES[loss](comparison)
    else:
        terms = alrp(comparison, comparison.vector(localisation.detach()[index.argsort().argsort()]))
    return comparison.scalar(terms.first), comparison.scalar(terms.second), index, torch.as_tensor(terms.rows)


def _gradient(
    first: Tensor,
    second: Tensor,
    logits: Tensor,
    targets: Tensor,
    index: Tensor,
    rows: Tensor,
    value: Tensor,
    method: str,
    backend: str,
    delta: float,
) -> Tensor:
    """The gradient at the logits, given those at the two values."""
    if index.numel() == 0:
        # No positives: value 0, and 0 everywhere. Something was not finite: value NaN, and NaN wherever not ignored.
        return (value * 0).expand_as(logits).masked_fill(targets < 0, 0)
    comparison = comparison_of(method, backend, logits)(logits, targets, delta, index)
    if not comparison.resolves():
        comparison = Pairwise(logits, targets, delta, index)
    first, second = comparison.vector(first), comparison.vector(second)
    weights, own_first, own_second = comparison.vector(rows[:, :3]).T
    return comparison.spread(weights * first, own_first * first + own_second * second)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, localisation, _, *ctx.settings = inputs
    first, _, index, rows = output
    ctx.dtype = None if localisation is None else localisation.dtype
    ctx.save_for_backward(logits, targets, index, rows, first)


def _backward(
    gradient: Callable[..., Tensor], ctx: Any, first: Tensor | None, second: Tensor | None
) -> tuple[Any, ...]:
    *saved, value = ctx.saved_tensors
    first, second = (torch.zeros_like(value) if part is None else part for part in (first, second))
    to_logits = gradient(first, second, *saved, value, *ctx.settings)
    to_localisation = None
    if ctx.needs_input_grad[2]:
        _, _, index, rows = saved
        to_localisation = (second * rows[index.argsort(), 3]).to(ctx.dtype)
    return to_logits, None, to_localisation, None, None, None, None


class _Rank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        ctx.set_materialize_grads(False)
        return output[:2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Any, ...]:
        return _backward(_gradient, ctx, first, second)


_rank_op = torch.library.custom_op("bucketrank::rank", _forward, mutates_args=())
_gradient_op = torch.library.custom_op("bucketrank::rank_gradient", _gradient, mutates_args=())


def _backward_op(ctx: Any, first: Tensor | None, second: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return _backward(_gradient_op, ctx, first, second)


_rank_op.register_autograd(_backward_op, setup_context=_save)


@_rank_op.register_fake
def _(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, loss: str, method: str, backend: str, delta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    positives = torch.library.get_ctx().new_dynamic_size()
    index = logits.new_empty(positives, dtype=torch.int64)
    return (
        logits.new_empty(()),
        logits.new_empty(()),
        index,
        precise(logits.new_empty(positives, 3 if localisation is None else 4)),
    )


@_gradient_op.register_fake
def _(first: Tensor, second: Tensor, logits: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits)
