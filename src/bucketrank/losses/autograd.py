"""Where ranking losses meet autograd: a forward that also prepares the gradient, a backward that spreads it.

A ranking loss has no derivative to take: its gradient is *defined* (identity update). Eager calls go through an
``autograd.Function``. ``torch.compile`` sees the custom op ``bucketrank::rank``, made of the same functions; its
dispatch would cost small inputs a tenth of a millisecond more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bucketrank.losses.backend import chosen_backend, comparison_of
from bucketrank.losses.comparison import Array, Comparison, precise
from bucketrank.losses.pairwise import Pairwise
from bucketrank.losses.terms import Terms, alrp, average_precision, interpolated_average_precision, rank_sort

LOSSES: dict[str, Callable[[Comparison], Terms]] = {
    "ap": average_precision,
    "interpolated_ap": interpolated_average_precision,
    "rs": rank_sort,
}


def rank(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, loss: str, method: str, delta: float
) -> Sequence[Tensor]:
    """The value or two of a ranking loss; ``logits`` and ``targets`` are flat, contiguous and of one dtype."""
    # The backend is read here, so that the backward pass, wherever it is called, does as the forward pass did.
    arguments = logits, targets, localisation, loss, method, chosen_backend(), delta
    if torch.compiler.is_compiling():
        first, second, *_ = _rank_op(*arguments)
        return first, second
    values: Sequence[Tensor] = _Rank.apply(*arguments)
    return values


def _compute(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, loss: str, method: str, backend: str, delta: float
) -> tuple[tuple[Tensor, ...], Comparison, Sequence[Array]]:
    """The values, and what :func:`_spread` needs: the comparison, and the vectors of ``Terms``, if any."""
    comparison = _compare(method, backend, logits, targets, delta)
    positives = len(comparison.scores)
    if localisation is not None and localisation.numel() != positives:
        raise ValueError(
            "alrp_loss: expected one localisation error for each of logits[targets > 0], "
            f"{positives} of them, got {localisation.numel()}"
        )
    if not comparison.finite or positives == 0:
        value = _value_of_nothing(logits, comparison)
        return (value, value.clone()), comparison, ()
    if localisation is None:
        terms = LOSSES[loss](comparison)
    else:
        in_rank_order = localisation.detach()[comparison.index.argsort().argsort()]
        terms = alrp(comparison, comparison.vector(in_rank_order))
    values = (terms.first,) if terms.second is None else (terms.first, terms.second)
    return tuple(map(comparison.scalar, values)), comparison, terms.vectors


def _compare(
    method: str, backend: str, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None
) -> Comparison:
    comparison = comparison_of(method, backend, logits)(logits, targets, delta, index)
    return comparison if comparison.resolves() else Pairwise(logits, targets, delta, index)


def _spread(first: Tensor | None, second: Tensor | None, comparison: Comparison, vectors: Sequence[Array]) -> Tensor:
    """The gradient at the logits, given those at the two values, or None for zero."""
    weights, own, *more = vectors
    by_first = 0 if first is None else comparison.vector(first)
    weights, own = weights * by_first, own * by_first
    if more and second is not None:
        own = own + more[0] * comparison.vector(second)
    return comparison.spread(weights, own)


def _value_of_nothing(logits: Tensor, comparison: Comparison) -> Tensor:
    """The value where nothing was compared."""
    return logits.new_full((), 0.0 if comparison.finite else torch.nan)


def _nothing(logits: Tensor, targets: Tensor, value: Tensor) -> Tensor:
    """The gradient where nothing was compared: 0 for a value of 0; for NaN, NaN wherever not ignored."""
    return (value * 0).expand_as(logits).masked_fill(targets < 0, 0)


class _Rank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, localisation: Tensor | None, *settings: Any) -> Any:
        values, ctx.comparison, ctx.vectors = _compute(logits, targets, localisation, *settings)
        # The comparison looks at logits and targets again: saved too, so that a change in place is an error.
        ctx.save_for_backward(logits, targets)
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None = None) -> tuple[Any, ...]:
        # What guards against second derivatives costs small inputs a tenth of their time: only where they can be asked.
        return (_eager_backward_once if torch.is_grad_enabled() else _eager_backward)(ctx, first, second)


def _eager_backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Any, ...]:
    logits, targets = ctx.saved_tensors
    to_localisation = None
    if not ctx.vectors:
        value = _value_of_nothing(logits, ctx.comparison)
        to_logits = _nothing(logits, targets, value)
        if ctx.needs_input_grad[2]:  # attached, though nothing is taught: distributed training waits for gradients
            to_localisation = value.repeat(len(ctx.comparison.scores))
    else:
        to_logits = _spread(first, second, ctx.comparison, ctx.vectors)
        if ctx.needs_input_grad[2] and second is not None:
            to_localisation = second * torch.as_tensor(ctx.vectors[3])[ctx.comparison.index.argsort()]
    return to_logits, None, to_localisation, None, None, None, None


_eager_backward_once = once_differentiable(_eager_backward)


@torch.library.custom_op("bucketrank::rank", mutates_args=())
def _rank_op(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, loss: str, method: str, backend: str, delta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, comparison, vectors = _compute(logits, targets, localisation, loss, method, backend, delta)
    first, second = (*values, torch.zeros_like(values[0]))[:2]
    if vectors:
        return first, second, comparison.index, torch.stack([torch.as_tensor(vector) for vector in vectors])
    return first, second, comparison.index, _rows(logits, loss, len(comparison.index)).fill_(torch.nan)


@_rank_op.register_fake
def _(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, loss: str, method: str, backend: str, delta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    positives = torch.library.get_ctx().new_dynamic_size()
    index = logits.new_empty(positives, dtype=torch.int64)
    return logits.new_empty(()), logits.new_empty(()), index, _rows(logits, loss, positives)


def _rows(logits: Tensor, loss: str, positives: int | torch.SymInt) -> Tensor:
    """Room for the vectors of ``Terms``."""
    return precise(logits.new_empty({"rs": 3, "alrp": 4}.get(loss, 2), positives))


@torch.library.custom_op("bucketrank::rank_gradient", mutates_args=())
def _gradient_op(
    first: Tensor,
    second: Tensor,
    logits: Tensor,
    targets: Tensor,
    value: Tensor,
    index: Tensor,
    rows: Tensor,
    method: str,
    backend: str,
    delta: float,
) -> Tensor:
    if index.numel() == 0 or value.isnan():
        return _nothing(logits, targets, value)
    comparison = _compare(method, backend, logits, targets, delta, index)
    return _spread(first, second, comparison, [comparison.vector(row) for row in rows])


@_gradient_op.register_fake
def _(first: Tensor, second: Tensor, logits: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, _, _, *ctx.settings = inputs
    first, _, index, rows = output
    ctx.save_for_backward(logits, targets, first, index, rows)


def _backward(ctx: Any, first: Tensor, second: Tensor, *_: Any) -> tuple[Any, ...]:
    *_, index, rows = ctx.saved_tensors
    to_localisation = second * rows[3][index.argsort()] if ctx.needs_input_grad[2] else None
    to_logits = _gradient_op(first, second, *ctx.saved_tensors, *ctx.settings)
    return to_logits, None, to_localisation, None, None, None, None


_rank_op.register_autograd(_backward, setup_context=_save)
