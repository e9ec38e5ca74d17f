"""Count what the loss side of one training step costs a GPU: launches, host waits and copies from the host.

The loss side is everything between the outputs of the heads and the summed loss: assignment, criterion, loss. A launch
is an operation of torch that is no view. A wait is an operation for which the host has to read a value of the device.
A copy is a tensor made of Python numbers, whose transfer to a GPU also waits. Counted on the CPU, where the same
operations run; ranking losses run as torch operations.

    python -m tests.detectors.loss_side_counts          # prints a table in Markdown
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bucketrank import use_backend
from bucketrank.detectors.co_detr.model import CoDETR
from bucketrank.detectors.criterion import Criterion, ranked
from bucketrank.detectors.rcnn import RPN

from .small_detectors import scene, small_detector

WAITS = ("nonzero", "_local_scalar_dense", "masked_select", "bincount", "equal", "_unique2", "is_nonzero")
READS = (Tensor.tolist, Tensor.cpu)  # no operation on the CPU
PAIRS = [
    *((name, loss) for name in ("atss", "paa", "retinanet") for loss in ("rs", "focal")),
    *((name, loss) for name in ("faster_rcnn", "mask_rcnn", "cascade_rcnn") for loss in ("rs", "ce")),
    *(("co_detr", loss) for loss in ("rs", "focal")),
]


@dataclass
class Counts:
    """The operations of a part of a step, by name."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    copies: int = 0

    def __str__(self) -> str:
        return f"{self.launches.total()} / {self.waits.total()} / {self.copies}"


class Counting:
    """Counts operations while it is not paused."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.pauses = 0

    def record(self, func: Any, args: Any) -> None:
        if self.pauses:
            return
        name = func._schema.name.removeprefix("aten::")
        if name == "lift_fresh":
            self.counts.copies += 1
        if func.is_view or name in ("lift_fresh", "detach"):
            return
        self.counts.launches[name] += 1
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        if name in WAITS or any(index is not None and index.dtype == torch.bool for index in indices):
            self.counts.waits[name] += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def pause_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*arguments: Any, **settings: Any) -> Any:
            with self.paused():
                return function(*arguments, **settings)

        return paused


class _Operations(TorchDispatchMode):
    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting = counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counting.record(func, args)
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and not self.counting.pauses:
            self.counting.counts.waits[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class _Uncounted(torch.autograd.Function):
    """A ranking loss that is computed, forward and backward, while the count is paused."""

    @staticmethod
    def forward(ctx: Any, counting: Counting, loss: Callable[..., Any], settings: Any, *tensors: Tensor) -> Any:
        with counting.paused(), torch.enable_grad():
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            terms = loss(*leaves, **settings)
            ctx.counting, ctx.leaves, ctx.terms = counting, leaves, terms
            return tuple(term.detach() for term in terms) if isinstance(terms, tuple) else terms.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with ctx.counting.paused():
            terms = ctx.terms if isinstance(ctx.terms, tuple) else (ctx.terms,)
            learned = [leaf for leaf in ctx.leaves if leaf.requires_grad]
            of_learned = iter(torch.autograd.grad(terms, learned, gradients, allow_unused=True))
            return None, None, None, *(next(of_learned) if leaf.requires_grad else None for leaf in ctx.leaves)


def count(name: str, loss: str, *, backward: bool, ranking: bool = True) -> Counts:
    """Return the counts of the loss side of one step of a small detector on two images.

    Without ``ranking`` the ranking loss itself is not counted, only what surrounds it.
    """
    model, (images, targets) = small_detector(name, loss=loss), scene()
    model(images, targets)  # anchors are cached
    counting = Counting()
    with ExitStack() as stack:
        stack.enter_context(use_backend("torch"))
        for module in _outer_modules(model):
            stack.callback(module.register_forward_pre_hook(lambda *_: _pause(counting, 1)).remove)
            stack.callback(module.register_forward_hook(lambda *call: _resume(counting, call[-1])).remove)
        for owner, method in ((RPN, "filter_proposals"), (CoDETR, "encode")):
            function = counting.pause_in(getattr(owner, method))
            stack.enter_context(mock.patch.object(owner, method, _as_method(function)))
        if not ranking:
            _leave_out_ranking(stack, counting)
        forward = model.losses
        counting.pauses += 1
        stack.enter_context(
            mock.patch.object(model, "losses", lambda *inputs: _count_forward(counting, forward, inputs))
        )
        stack.enter_context(_Reads(counting))
        stack.enter_context(_Operations(counting))
        total = model(images, targets)["total"]
        if backward:
            _pause(counting, -1)
            total.backward()
    return counting.counts


def _pause(counting: Counting, change: int) -> None:
    counting.pauses += change


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **settings: function(*arguments, **settings)


def _count_forward(counting: Counting, forward: Callable[..., Any], inputs: Any) -> dict[str, Tensor]:
    _pause(counting, -1)
    terms = forward(*inputs)
    total = torch.stack(list(terms.values())).sum()
    _pause(counting, 1)
    return {"total": total}


def _resume(counting: Counting, output: Any) -> Any:
    output = _leaves(output)
    _pause(counting, -1)
    return output


def _leaves(output: Any) -> Any:
    """Return the output of a head cut off from what comes before it, so that the backward pass ends there."""
    if isinstance(output, Tensor):
        return output.detach().requires_grad_() if output.requires_grad else output
    if isinstance(output, (list, tuple)):
        return type(output)(_leaves(each) for each in output)
    if is_dataclass(output) and not isinstance(output, type):
        return replace(output, **{each.name: _leaves(getattr(output, each.name)) for each in fields(output)})
    return output


def _outer_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules without a criterion: networks, not loss."""
    for child in module.children():
        if not any(isinstance(each, Criterion) for each in child.modules()):
            if not isinstance(child, (nn.ModuleDict, nn.ModuleList)):
                yield child
            else:
                yield from child.children()
        elif not isinstance(child, Criterion):
            yield from _outer_modules(child)


def _leave_out_ranking(stack: ExitStack, counting: Counting) -> None:
    for function in ("rank_sort_loss", "ap_loss", "alrp_loss"):
        loss = getattr(ranked, function)

        def uncounted(*tensors: Tensor, loss: Callable[..., Any] = loss, **settings: Any) -> Any:
            return _Uncounted.apply(counting, loss, settings, *tensors)

        stack.enter_context(mock.patch.object(ranked, function, uncounted))


def table() -> str:
    """Return the counts of all detectors as Markdown: launches / waits / copies from the host."""
    lines = [
        "| detector | loss | forward | forward + backward | with the ranking loss |",
        "|---|---|---|---|---|",
    ]
    for name, loss in PAIRS:
        forward, both = (count(name, loss, backward=backward, ranking=False) for backward in (False, True))
        whole = str(count(name, loss, backward=True)) if loss == "rs" else ""
        lines.append(f"| {name} | {loss} | {forward} | {both} | {whole} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
