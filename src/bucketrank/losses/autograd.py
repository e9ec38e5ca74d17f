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

from bucketrank.losses.backend import chosen_backend, triton_for
from bucketrank.losses.comparison import precise
from bucketrank.losses.rankings import Settings, prepare_again, rank_all, rankings_of
from bucketrank.losses.terms import RANKING_LOSSES, Gradients


def rank(
    logits: Tensor,
    targets: Tensor,
    localisation: Tensor | None,
    loss: str,
    method: str,
    delta: float,
    sizes: Sequence[int] | None = None,
    max_positives: int | None = None,
) -> Sequence[Tensor]:
    """Return the one or two values of a ranking loss; ``logits`` and ``targets`` are flat, contiguous, of one dtype.

    With ``sizes``, the lengths of consecutive rankings, a value has one entry per ranking.
    """
    # The backend is read here, so that the backward pass uses the backend of the forward pass.
    settings = loss, method, chosen_backend(), delta, sizes, max_positives
    if torch.compiler.is_compiling():
        first, second, *_ = _rank_op(logits, targets, localisation, *settings)
        return first, second
    values: Sequence[Tensor] = _Rank.apply(logits, targets, localisation, settings)
    return values


class _Rank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, localisation: Tensor | None, settings: Any) -> Any:
        values, ctx.prepared = rank_all(logits, targets, localisation, Settings(*settings))
        # The backward pass reads logits and targets again. Saved, they cannot be changed in place without an error.
        ctx.save_for_backward(logits, targets)
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None = None) -> tuple[Any, ...]:
        logits, _ = ctx.saved_tensors  # raises if one of them was changed in place
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                gradients = ctx.prepared.backward(first, second)
            at_logits, at_localisation = (_attach(gradient, logits, first, second) for gradient in gradients)
        else:
            at_logits, at_localisation = ctx.prepared.backward(first, second)
        return at_logits, None, at_localisation if ctx.needs_input_grad[2] else None, None


class _NoSecondDerivative(torch.autograd.Function):
    """Pass a gradient on, and raise if it is differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *_inputs: Tensor | None) -> Tensor:  # noqa: ARG004 (autograd's signature)
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:  # noqa: ARG004 (autograd's signature)
        raise RuntimeError(
            "ap_loss, rank_sort_loss and alrp_loss have no second derivative: their gradient is defined, not derived; "
            "leave out create_graph=True, or keep the ranking loss out of the part that is differentiated twice"
        )


def _attach(gradient: Tensor | None, *inputs: Tensor | None) -> Tensor | None:
    """Return a gradient that depends on the inputs of the backward pass, so that differentiating it raises."""
    return None if gradient is None else _NoSecondDerivative.apply(gradient, *inputs)


@torch.library.custom_op("bucketrank::rank", mutates_args=())
def _rank_op(
    logits: Tensor,
    targets: Tensor,
    localisation: Tensor | None,
    loss: str,
    method: str,
    backend: str,
    delta: float,
    sizes: Sequence[int] | None,
    max_positives: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the two values, and what the backward pass needs of the positives, ranking after ranking.

    These are their positions in their ranking, the fields of ``Gradients``, and the number of positives per ranking, on
    the CPU.
    """
    settings = Settings(loss, method, backend, delta, sizes, max_positives)
    values, prepared = rank_all(logits, targets, localisation, settings)
    first, second = (*values, torch.zeros_like(values[0]))[:2]
    rankings = rankings_of(prepared)
    if rankings is None:  # by Triton: the backward pass computes the forward pass again
        counts = torch.zeros(first.numel(), dtype=torch.int64)
        return first, second, logits.new_empty(0, dtype=torch.int64), _empty_rows(logits, loss, 0), counts
    index = [ranking.index for ranking in rankings] or [logits.new_empty(0, dtype=torch.int64)]
    rows = [_rows(logits, ranking.index, ranking.gradients, loss) for ranking in rankings]
    counts = torch.tensor([len(positions) for positions in index[: len(rankings)]], dtype=torch.int64)
    return first, second, torch.cat(index), torch.cat(rows or [_empty_rows(logits, loss, 0)], 1), counts


def _rows(logits: Tensor, index: Tensor, gradients: Gradients | None, loss: str) -> Tensor:
    if gradients is None:
        return _empty_rows(logits, loss, len(index)).fill_(torch.nan)
    return torch.stack([torch.as_tensor(getattr(gradients, field)) for field in RANKING_LOSSES[loss].gradients])


@_rank_op.register_fake
def _(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, loss: str, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _method, _backend, _delta, sizes, _max_positives = settings
    shape = () if sizes is None else (len(sizes),)
    positives = torch.library.get_ctx().new_dynamic_size()
    index = logits.new_empty(positives, dtype=torch.int64)
    counts = torch.empty(1 if sizes is None else len(sizes), dtype=torch.int64, device="cpu")
    return logits.new_empty(shape), logits.new_empty(shape), index, _empty_rows(logits, loss, positives), counts


def _empty_rows(logits: Tensor, loss: str, positives: int | torch.SymInt) -> Tensor:
    """Return memory for the fields of ``Gradients`` that ``loss`` fills, one row each."""
    return precise(logits.new_empty(len(RANKING_LOSSES[loss].gradients), positives))


@torch.library.custom_op("bucketrank::rank_gradient", mutates_args=())
def _gradient_op(
    first: Tensor,
    second: Tensor,
    logits: Tensor,
    targets: Tensor,
    localisation: Tensor | None,
    value: Tensor,
    index: Tensor,
    rows: Tensor,
    counts: Tensor,
    loss: str,
    method: str,
    backend: str,
    delta: float,
    sizes: Sequence[int] | None,
    max_positives: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients at the logits and at the localisation errors; the latter is empty if there are none."""
    settings = Settings(loss, method, backend, delta, sizes, max_positives)
    if triton_for(method, backend, logits) is not None:
        prepared = rank_all(logits, targets, localisation, settings)[1]
    else:
        prepared = prepare_again(logits, targets, value, index, rows, counts.tolist(), settings)
    at_logits, at_localisation = prepared.backward(first, second)
    if localisation is None or at_localisation is None:
        return at_logits, logits.new_empty(0)
    return at_logits, at_localisation.to(localisation.dtype)


@_gradient_op.register_fake
def _(
    first: Tensor, second: Tensor, logits: Tensor, targets: Tensor, localisation: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits), logits.new_empty(0) if localisation is None else torch.empty_like(localisation)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, localisation, *ctx.settings = inputs
    first, _, *prepared = output
    ctx.save_for_backward(logits, targets, localisation, first, *prepared)


def _backward(ctx: Any, first: Tensor, second: Tensor, *_: Any) -> tuple[Any, ...]:
    at_logits, at_localisation = _gradient_op(first, second, *ctx.saved_tensors, *ctx.settings)
    at_localisation = at_localisation if ctx.needs_input_grad[2] else None
    return at_logits, None, at_localisation, None, None, None, None, None, None


_rank_op.register_autograd(_backward, setup_context=_save)
