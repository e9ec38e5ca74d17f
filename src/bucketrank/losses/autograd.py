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

from bucketrank.losses.backend import chosen_backend
from bucketrank.losses.rankings import Settings, rank_all


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
        compiled: Sequence[Tensor] = _rank_op(logits, targets, localisation, *settings)
        return compiled
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
) -> tuple[Tensor, Tensor]:
    """Return the two values; the second is 0 if the loss has one.

    What the backward pass needs has one entry per positive. Torch does not trace outputs of unknown length without a
    setting or a graph break, so the backward pass computes the forward pass again.
    """
    values, _ = rank_all(logits, targets, localisation, Settings(loss, method, backend, delta, sizes, max_positives))
    first, second = (*values, torch.zeros_like(values[0]))[:2]
    return first, second


@_rank_op.register_fake
def _(logits: Tensor, targets: Tensor, localisation: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor]:
    _loss, _method, _backend, _delta, sizes, _max_positives = settings
    shape = () if sizes is None else (len(sizes),)
    return logits.new_empty(shape), logits.new_empty(shape)


@torch.library.custom_op("bucketrank::rank_gradient", mutates_args=())
def _gradient_op(
    first: Tensor,
    second: Tensor,
    logits: Tensor,
    targets: Tensor,
    localisation: Tensor | None,
    loss: str,
    method: str,
    backend: str,
    delta: float,
    sizes: Sequence[int] | None,
    max_positives: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients at the logits and at the localisation errors; the latter is empty if there are none."""
    settings = Settings(loss, method, backend, delta, sizes, max_positives)
    _, prepared = rank_all(logits, targets, localisation, settings)
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
    ctx.save_for_backward(logits, targets, localisation)


def _backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Any, ...]:
    at_logits, at_localisation = _gradient_op(first, second, *ctx.saved_tensors, *ctx.settings)
    at_localisation = at_localisation if ctx.needs_input_grad[2] else None
    return at_logits, None, at_localisation, None, None, None, None, None, None


_rank_op.register_autograd(_backward, setup_context=_save)
