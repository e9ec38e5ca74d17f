"""The entry point of every ranking loss to autograd: the forward pass also prepares the gradient.

A ranking loss has no derivative: its gradient is *defined* (identity update). Eager calls go through an
``autograd.Function``. ``torch.compile`` gets the custom op ``bucketrank::rank``, made of the same functions; in eager
calls the dispatch of the op would cost small inputs a tenth of a millisecond more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bucketrank.losses.backend import chosen_backend, comparison_of
from bucketrank.losses.comparison import Comparison, precise
from bucketrank.losses.pairwise import Pairwise
from bucketrank.losses.terms import RANKING_LOSSES, Gradients


def rank(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, loss: str, method: str, delta: float
) -> Sequence[Tensor]:
    """Return the one or two values of a ranking loss; ``logits`` and ``targets`` are flat, contiguous, of one dtype."""
    # The backend is read here, so that the backward pass uses the backend of the forward pass.
    arguments = logits, targets, localisation, loss, method, chosen_backend(), delta
    if torch.compiler.is_compiling():
        first, second, *_ = _rank_op(*arguments)
        return first, second
    values: Sequence[Tensor] = _Rank.apply(*arguments)
    return values


def _compute(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, loss: str, method: str, backend: str, delta: float
) -> tuple[tuple[Tensor, ...], Comparison, Gradients | None]:
    """Return the values, and the comparison and gradients for the backward pass; None if there is nothing to rank."""
    comparison = _compare(method, backend, logits, targets, delta)
    positives = len(comparison.scores)
    if localisation is not None and localisation.numel() != positives:
        raise ValueError(
            "alrp_loss: expected one localisation error for each of logits[targets > 0], "
            f"{positives} of them, got {localisation.numel()}"
        )
    if not comparison.finite or positives == 0:
        value = _degenerate_value(logits, comparison)
        return (value, value.clone()), comparison, None
    compute_terms = RANKING_LOSSES[loss].terms
    if localisation is None:
        first, second, gradients = compute_terms(comparison)
    else:
        in_rank_order = localisation.detach()[comparison.index.argsort().argsort()]
        first, second, gradients = compute_terms(comparison, comparison.vector(in_rank_order))
    mean = comparison.mean
    return (mean(first),) if second is None else (mean(first), mean(second)), comparison, gradients


def _compare(
    method: str, backend: str, logits: Tensor, targets: Tensor, delta: float, index: Tensor | None = None
) -> Comparison:
    comparison = comparison_of(method, backend, logits)(logits, targets, delta, index)
    return comparison if comparison.is_accurate() else Pairwise(logits, targets, delta, index)


def _gradient_at_logits(
    first: Tensor | None, second: Tensor | None, comparison: Comparison, gradients: Gradients
) -> Tensor:
    """Return the gradient at the logits from the gradients at the two values, where None stands for zero."""
    positives = len(comparison.scores)
    by_first = 0 if first is None else comparison.number(first) / positives
    own = gradients.positives * by_first
    if gradients.second_positives is not None and second is not None:
        own = own + gradients.second_positives * (comparison.number(second) / positives)
    return comparison.spread(gradients.negative_weights * by_first, own)


def _gradient_at_localisation(second: Tensor, index: Tensor, gradients: Gradients) -> Tensor:
    """Return the gradient at the localisation errors, in the order of the logits, from that at the second value."""
    return second * (torch.as_tensor(gradients.localisation)[index.argsort()] / index.numel())


def _degenerate_value(logits: Tensor, comparison: Comparison) -> Tensor:
    """Return the loss when there is nothing to rank: 0, or NaN for input that is not finite."""
    return logits.new_full((), 0.0 if comparison.finite else torch.nan)


def _degenerate_gradient(logits: Tensor, targets: Tensor, value: Tensor) -> Tensor:
    """Return the gradient when there is nothing to rank: 0, or NaN at each entry not ignored if ``value`` is NaN."""
    return (value * 0).expand_as(logits).masked_fill(targets < 0, 0)


class _Rank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, localisation: Tensor | None, *settings: Any) -> Any:
        values, ctx.comparison, ctx.gradients = _compute(logits, targets, localisation, *settings)
        # The comparison reads logits and targets again. Saved, they cannot be changed in place without an error.
        ctx.save_for_backward(logits, targets)
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None = None) -> tuple[Any, ...]:
        # once_differentiable takes a tenth of the time of small inputs. Only a graph of the backward pass needs it.
        return (_eager_backward_once if torch.is_grad_enabled() else _eager_backward)(ctx, first, second)


def _eager_backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Any, ...]:
    logits, targets = ctx.saved_tensors
    at_localisation = None
    if ctx.gradients is None:
        value = _degenerate_value(logits, ctx.comparison)
        at_logits = _degenerate_gradient(logits, targets, value)
        if ctx.needs_input_grad[2]:  # Return a gradient rather than None: DDP waits for one.
            at_localisation = value.repeat(len(ctx.comparison.scores))
    else:
        at_logits = _gradient_at_logits(first, second, ctx.comparison, ctx.gradients)
        if ctx.needs_input_grad[2] and second is not None:
            at_localisation = _gradient_at_localisation(second, ctx.comparison.index, ctx.gradients)
    return at_logits, None, at_localisation, None, None, None, None


_eager_backward_once = once_differentiable(_eager_backward)


@torch.library.custom_op("bucketrank::rank", mutates_args=())
def _rank_op(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, loss: str, method: str, backend: str, delta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, comparison, gradients = _compute(logits, targets, localisation, loss, method, backend, delta)
    first, second = (*values, torch.zeros_like(values[0]))[:2]
    if gradients is None:
        return first, second, comparison.index, _empty_rows(logits, loss, len(comparison.index)).fill_(torch.nan)
    rows = torch.stack([torch.as_tensor(getattr(gradients, field)) for field in RANKING_LOSSES[loss].gradients])
    return first, second, comparison.index, rows


@_rank_op.register_fake
def _(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, loss: str, method: str, backend: str, delta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    positives = torch.library.get_ctx().new_dynamic_size()
    index = logits.new_empty(positives, dtype=torch.int64)
    return logits.new_empty(()), logits.new_empty(()), index, _empty_rows(logits, loss, positives)


def _empty_rows(logits: Tensor, loss: str, positives: int | torch.SymInt) -> Tensor:
    """Return memory for the fields of ``Gradients`` that ``loss`` fills, one row each."""
    return precise(logits.new_empty(len(RANKING_LOSSES[loss].gradients), positives))


def _gradients_from(rows: Sequence[Any], loss: str) -> Gradients:
    return Gradients(**dict(zip(RANKING_LOSSES[loss].gradients, rows, strict=True)))


@torch.library.custom_op("bucketrank::rank_gradient", mutates_args=())
def _gradient_op(
    first: Tensor,
    second: Tensor,
    logits: Tensor,
    targets: Tensor,
    value: Tensor,
    index: Tensor,
    rows: Tensor,
    loss: str,
    method: str,
    backend: str,
    delta: float,
) -> Tensor:
    if index.numel() == 0 or value.isnan():
        return _degenerate_gradient(logits, targets, value)
    comparison = _compare(method, backend, logits, targets, delta, index)
    gradients = _gradients_from([comparison.vector(row) for row in rows], loss)
    return _gradient_at_logits(first, second, comparison, gradients)


@_gradient_op.register_fake
def _(first: Tensor, second: Tensor, logits: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, _, *ctx.settings = inputs
    first, _, index, rows = output
    ctx.save_for_backward(logits, targets, first, index, rows)


def _backward(ctx: Any, first: Tensor, second: Tensor, *_: Any) -> tuple[Any, ...]:
    *_, index, rows = ctx.saved_tensors
    at_localisation = None
    if ctx.needs_input_grad[2]:
        at_localisation = _gradient_at_localisation(second, index, _gradients_from(rows.unbind(), ctx.settings[0]))
    at_logits = _gradient_op(first, second, *ctx.saved_tensors, *ctx.settings)
    return at_logits, None, at_localisation, None, None, None, None


_rank_op.register_autograd(_backward, setup_context=_save)
