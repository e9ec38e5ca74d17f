"""What the loss takes of a step: its forward and backward pass cut out of the step, and timed where they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from bucketrank.bench.detectors.study import Head
from bucketrank.detectors.criterion import Assigned, Criterion, LossTerms
from bucketrank.ops.assignment import IGNORED

HOW = (
    "in steps of their own, in rounds like the others: the inputs of each criterion are cut off from the graph, its"
    " forward pass and right after it the backward pass of its terms run between two readings of the clock, and the"
    " gradients found go on into the rest of the backward pass; so the step does the same work, in another order. The"
    " share is that time over the whole of the same step. Assignment, sampling and coding of boxes are not the loss's"
)


def criteria(model: nn.Module) -> Iterator[tuple[str, Criterion]]:
    """The criteria of a detector, by the names of their heads."""
    for name, module in model.named_modules():
        if isinstance(module, Criterion):
            yield name.removesuffix("criterion").strip(".") or "head", module


class Stopwatch:
    """Adds up the seconds in which it runs."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.seconds = 0.0
        self._synchronize = synchronize

    @contextmanager
    def running(self) -> Iterator[None]:
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self.seconds += time.perf_counter() - start


@contextmanager
def split(model: nn.Module, watch: Stopwatch) -> Iterator[None]:
    """Inside, a step of ``model`` has the passes of its losses one after another, with ``watch`` running."""
    changed = [module for _, module in criteria(model)]
    for criterion in changed:
        criterion.forward = _split_forward(criterion.forward, watch)  # type: ignore[assignment, method-assign]
        criterion.masks = _split_masks(criterion.masks, watch)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for criterion in changed:
            # What was put before the methods of the class.
            del criterion.forward, criterion.masks


def _split_forward(forward: Callable[[Assigned], LossTerms], watch: Stopwatch) -> Callable[[Assigned], LossTerms]:
    def timed(found: Assigned) -> LossTerms:
        names = [field.name for field in fields(found) if _has_gradient(getattr(found, field.name))]
        inputs = [getattr(found, name) for name in names]

        def terms_of(leaves: Sequence[Tensor]) -> LossTerms:
            return forward(replace(found, **dict(zip(names, leaves, strict=True))))

        return _cut_out(terms_of, inputs, watch)

    return timed


def _split_masks(masks: Callable[..., Tensor], watch: Stopwatch) -> Callable[..., Tensor]:
    def timed(logits: Tensor, targets: Tensor, **others: Any) -> Tensor:
        return _cut_out(lambda leaves: {"mask": masks(leaves[0], targets, **others)}, [logits], watch)["mask"]

    return timed


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _cut_out(terms_of: Callable[[Sequence[Tensor]], LossTerms], inputs: list[Tensor], watch: Stopwatch) -> LossTerms:
    """The terms, with the gradients already computed: what the step's own backward pass finds here is one product."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    with watch.running():
        terms = terms_of(leaves)
        total = torch.stack(list(terms.values())).sum()
        found = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else [None] * len(leaves)
    carried = total.new_zeros(())
    for value, gradient in zip(inputs, found, strict=True):
        if gradient is not None:
            carried = carried + (value * gradient).sum()
    first, *_ = terms
    values = {name: term.detach() for name, term in terms.items()}
    # Exactly the value of the term, with the gradient of all.
    return {**values, first: values[first] + (carried - carried.detach())}


@contextmanager
def listening(model: nn.Module) -> Iterator[list[tuple[str, Assigned]]]:
    """Inside, what the criteria are given in a step is kept, by the names of their heads."""
    heard: list[tuple[str, Assigned]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given, name=name: heard.append((name, given[0])))
        for name, module in criteria(model)
    ]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def head_of(name: str, found: Assigned) -> Head:
    """What a criterion was given, in numbers."""
    return Head(
        name=name,
        candidates=int((found.labels != IGNORED).sum()),
        classes=found.logits.shape[1],
        positives=int(found.positives.sum()),
    )
