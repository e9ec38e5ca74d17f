"""Autograd for the ranking losses: the forward pass also prepares the gradient.

A ranking loss has no derivative: its gradient is *defined* (identity update). Eager calls go through an
``autograd.Function``. ``torch.compile`` gets custom ops, made of the same functions; in eager calls the dispatch of an
op would cost small inputs a tenth of a millisecond more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bucketrank.losses.backend import chosen_backend, ranks_fused, triton_for
from bucketrank.losses.rankings import Prepared, Settings, rank_all, unit_gradients


class Ranked(NamedTuple):
    """The one or two values of a ranking loss; with ``sizes``, one entry per ranking."""

    values: Sequence[Tensor]
    # Positives of each ranking; None without ``sizes``.
    counts: Tensor | None


def rank(
    logits: Tensor,
    targets: Tensor,
    localisation: Tensor | None,
    loss: str,
    method: str,
    delta: float,
    sizes: Sequence[int] | None = None,
    max_positives: int | None = None,
) -> Ranked:
    """Rank ``logits`` by ``targets``, both flat and contiguous; ``sizes`` are the lengths of consecutive rankings."""
    # Read the backend here, so that the backward pass uses the same one.
    settings = Settings(loss, method, chosen_backend(), delta, sizes, max_positives)
    if torch.compiler.is_compiling():
        op = _rank_op if max_positives is None else _rank_within_capacity_op
        if ranks_fused(method, settings.backend, logits.device.type):
            op = _rank_with_gradients_op
        first, second, counts, *_ = op(logits, targets, localisation, *settings)
        return Ranked((first, second), None if sizes is None else counts)
    outputs = _Rank.apply(logits, targets, localisation, settings)
    return Ranked(outputs, None) if sizes is None else Ranked(outputs[:-1], outputs[-1])


def _forward(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, settings: Settings
) -> tuple[tuple[Tensor, ...], Prepared]:
    """Return the values and the prepared backward pass."""
    is_float32 = logits.dtype == targets.dtype == torch.float32
    # The Triton kernels read half precision directly; the others need a dtype that holds both exactly.
    if not is_float32 and triton_for(settings.method, settings.backend, logits) is None:
        dtype = _value_dtype(logits, targets)
        logits, targets = logits.to(dtype), targets.to(dtype)
    return rank_all(logits, targets, localisation, settings)


def _value_dtype(logits: Tensor, targets: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(logits.dtype, targets.dtype), torch.float32)


def _counts(prepared: Prepared, device: torch.device) -> Tensor:
    counts = prepared.counts
    if isinstance(counts, Tensor):  # the Triton kernels count on the device
        return counts
    return torch.tensor(counts, dtype=torch.int32, device="cpu").to(device, non_blocking=True)


class _Rank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, localisation: Tensor | None, settings: Settings) -> Any:
        values, ctx.prepared = _forward(logits, targets, localisation, settings)
        # The backward pass reads logits and targets again. Saving them detects in-place changes.
        ctx.save_for_backward(logits, targets)
        ctx.set_materialize_grads(False)
        ctx.terms = len(values)
        if settings.sizes is None:
            return values
        counts = _counts(ctx.prepared, logits.device)
        ctx.mark_non_differentiable(counts)
        return *values, counts

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        logits, _ = ctx.saved_tensors  # raises if one of them was changed in place
        first, second = upstream[0], upstream[1] if ctx.terms > 1 else None
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
    """Make a gradient depend on the inputs of the backward pass, so that differentiating it raises."""
    return None if gradient is None else _NoSecondDerivative.apply(gradient, *inputs)


# The ops of torch.compile. The fields of Settings are arguments of each op, since delta and sizes may be symbols.
_INPUTS = "Tensor logits, Tensor targets, Tensor? localisation"
_SETTINGS = "str loss, str method, str backend, float delta, SymInt[]? sizes, int? max_positives"
_STATE = "Tensor memory, Tensor index, Tensor kinds"
_OUTPUTS = "(Tensor first, Tensor second, Tensor counts, " + _STATE + ")"
_RANK = f"({_INPUTS}, {_SETTINGS}) -> {_OUTPUTS}"
_GRADIENT = (
    f"(Tensor first, Tensor second, {_STATE}, {_INPUTS}, {_SETTINGS}) -> (Tensor at_logits, Tensor at_localisation)"
)
# CUDA graphs must not capture an op with a device sync. Older torch versions do not know this tag.
_WAITS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


def _op(name: str, function: Any, schema: str, **options: Any) -> Any:
    return torch.library.custom_op(f"bucketrank::{name}", function, mutates_args=(), schema=schema, **options)


def _values_and_counts(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, call: Settings
) -> tuple[tuple[Tensor, Tensor, Tensor], Prepared]:
    """Return two values (the second is 0 if the loss has only one) and the counts, and the prepared backward pass."""
    values, prepared = _forward(logits, targets, localisation, call)
    first, second = (*values, torch.zeros_like(values[0]))[:2]
    counts = logits.new_zeros(0, dtype=torch.int32) if call.sizes is None else _counts(prepared, logits.device)
    return (first, second, counts), prepared


def _rank_and_keep(logits: Tensor, targets: Tensor, localisation: Tensor | None, *settings: Any) -> tuple[Tensor, ...]:
    """Return two values, the counts, and the backward state.

    The state has a static size with Triton kernels and a capacity. Otherwise it has one entry per positive, and torch
    does not trace outputs of unknown length without a graph break: the state is empty, and the backward pass computes
    the forward pass again.
    """
    call = Settings(*settings)
    outputs, prepared = _values_and_counts(logits, targets, localisation, call)
    if _has_static_state(logits, call):
        ranking: Any = prepared
        return *outputs, *ranking.state
    return *outputs, *(logits.new_empty(0, dtype=dtype) for dtype in _STATE_DTYPES)


_STATE_DTYPES = (torch.uint8, torch.int64, torch.int8)
_rank_op = _op("rank", _rank_and_keep, _RANK, **_WAITS)
_rank_within_capacity_op = _op("rank_within_capacity", _rank_and_keep, _RANK)


def _has_static_state(logits: Tensor, settings: Settings) -> bool:
    return settings.max_positives is not None and triton_for(settings.method, settings.backend, logits) is not None


def _fake_rank(logits: Tensor, targets: Tensor, _localisation: Tensor | None, *settings: Any) -> tuple[Tensor, ...]:
    call = Settings(*settings)
    shape = () if call.sizes is None else (len(call.sizes),)
    values = [logits.new_empty(shape, dtype=_value_dtype(logits, targets)) for _ in range(2)]
    counts = logits.new_empty(0 if call.sizes is None else len(call.sizes), dtype=torch.int32)
    lengths = (0, 0, 0)
    if _has_static_state(logits, call):
        triton: Any = triton_for(call.method, call.backend, logits)
        lengths = triton.state_sizes(logits, targets, **call.for_triton(logits))
    return *values, counts, *(logits.new_empty(n, dtype=t) for n, t in zip(lengths, _STATE_DTYPES, strict=True))


def _compute_gradient(
    first: Tensor, second: Tensor, memory: Tensor, index: Tensor, kinds: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradients at the logits and at the localisation errors; the latter is empty if there are none."""
    logits, targets, localisation, *settings = inputs
    call = Settings(*settings)
    if memory.numel() > 0:
        triton: Any = triton_for(call.method, call.backend, logits)
        state = memory, index, kinds
        prepared = triton.resume_ranking(logits, targets, localisation, state, **call.for_triton(logits))
    else:
        _, prepared = _forward(logits, targets, localisation, call)
    at_logits, at_localisation = prepared.backward(first, second)
    at_logits = at_logits.to(logits.dtype)
    if localisation is None or at_localisation is None:
        return at_logits, logits.new_empty(0)
    return at_logits, at_localisation.to(localisation.dtype)


def _fake_gradient(*inputs: Any) -> tuple[Tensor, Tensor]:
    logits, _targets, localisation = inputs[5:8]
    return torch.empty_like(logits), logits.new_empty(0) if localisation is None else torch.empty_like(localisation)


_gradient_op = _op("rank_gradient", _compute_gradient, _GRADIENT, **_WAITS)
_gradient_within_capacity_op = _op("rank_within_capacity_gradient", _compute_gradient, _GRADIENT)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, localisation, *ctx.settings = inputs
    ctx.save_for_backward(*output[3:], logits, targets, localisation)


def _rank_with_gradients(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, *settings: Any
) -> tuple[Tensor, ...]:
    """Return two values, the counts, and the gradients of the values, which have a static size."""
    call = Settings(*settings)
    outputs, prepared = _values_and_counts(logits, targets, localisation, call)
    return *outputs, *unit_gradients(prepared, outputs[0], localisation, call.loss)


def _fake_rank_with_gradients(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, *settings: Any
) -> tuple[Tensor, ...]:
    first, second, counts, *_ = _fake_rank(logits, targets, localisation, *settings)
    errors = 0 if localisation is None else localisation.numel()
    sizes = logits.numel(), logits.numel() if Settings(*settings).loss == "rs" else 0, errors
    return first, second, counts, *(first.new_empty(size) for size in sizes)


def _scale_gradients(
    first: Tensor, second: Tensor, at_first: Tensor, at_second: Tensor, at_errors: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradients at the logits and at the localisation errors, from those of the values."""
    logits, targets, localisation, *settings = inputs
    sizes = Settings(*settings).sizes
    if sizes is not None:
        lengths = torch.tensor(list(sizes), device="cpu")
        first, second = (each.repeat_interleave(lengths, output_size=logits.numel()) for each in (first, second))
    at_logits = at_first * first
    if at_second.numel() > 0:
        at_logits.addcmul_(at_second, second.expand_as(at_logits))
    if localisation is None:
        return at_logits.to(logits.dtype), logits.new_empty(0)
    by_positive = second if sizes is None else second[targets > 0]
    return at_logits.to(logits.dtype), (at_errors * by_positive).to(localisation.dtype)


# Inductor caches code by the name of an op on disk, so an op with another state has another name.
_rank_with_gradients_op = _op("rank_with_gradients", _rank_with_gradients, _RANK)
_scale_gradients_op = _op("scale_gradients", _scale_gradients, _GRADIENT)


def _connect(op: Any, gradient_op: Any, fake: Any = _fake_rank) -> None:
    def backward(ctx: Any, first: Tensor, second: Tensor, *_state: Any) -> tuple[Any, ...]:
        at_logits, at_localisation = gradient_op(first, second, *ctx.saved_tensors, *ctx.settings)
        at_localisation = at_localisation if ctx.needs_input_grad[2] else None
        return at_logits, None, at_localisation, *[None] * len(ctx.settings)

    op.register_fake(fake)
    gradient_op.register_fake(_fake_gradient)
    op.register_autograd(backward, setup_context=_save)


_connect(_rank_op, _gradient_op)
_connect(_rank_within_capacity_op, _gradient_within_capacity_op)
_connect(_rank_with_gradients_op, _scale_gradients_op, _fake_rank_with_gradients)
