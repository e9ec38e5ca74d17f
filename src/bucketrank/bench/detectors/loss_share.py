"""The share of the loss in a step: its forward and backward pass, measured inside the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bucketrank.bench.detectors.detector_results import Head
from bucketrank.bench.device_clock import DeviceClock
from bucketrank.detectors.assignment import IGNORED
from bucketrank.detectors.criterion import Assigned, Criterion, LossTerms
from bucketrank.detectors.mask_rcnn import MaskRCNN

SHARE_RULE = (
    "timed in separate steps, in rounds like the others: the inputs of each criterion are detached from the graph; its"
    " forward pass and the backward pass of its terms run directly after one another and are timed; the gradients then"
    " enter the rest of the backward pass, so the step does the same work in another order. The share is that time"
    " over the time of the same step. Assignment, sampling and encoding of boxes do not count as the loss"
)


def criteria(model: nn.Module) -> Iterator[tuple[str, Criterion]]:
    """Yield the criteria of a detector with the names of their heads."""
    for name, module in model.named_modules():
        if isinstance(module, Criterion):
            yield name.removesuffix("criterion").strip(".") or "head", module


class Meter(Protocol):
    """A measurement of the losses inside a step: a :class:`Stopwatch`, or a counter of launches."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context whose cost is added to the meter."""


class Stopwatch:
    """A meter that adds up the seconds spent in :meth:`running`."""

    def __init__(self, clock: DeviceClock) -> None:
        self.seconds = 0.0
        self._clock = clock

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = self._clock.start()
        yield
        self.seconds += stop()


@contextmanager
def split_losses(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Make each loss of ``model`` run its backward pass right after its forward pass, and measure both passes."""
    changed = [module for _, module in criteria(model)]
    mask_losses = {module: module.mask_loss for module in model.modules() if isinstance(module, MaskRCNN)}
    for criterion in changed:
        criterion.forward = _split_forward(criterion.forward, meter)  # type: ignore[assignment, method-assign]
    for detector, mask_loss in mask_losses.items():
        detector.mask_loss = _split_masks(mask_loss, meter)
    try:
        yield
    finally:
        for criterion in changed:
            del criterion.forward  # an attribute of the instance, which hides the method of the class
        for detector, mask_loss in mask_losses.items():
            detector.mask_loss = mask_loss


def _split_forward(forward: Callable[[Any], Any], meter: Meter) -> Callable[[Any], Any]:
    def measured(assigned: Assigned | list[Assigned]) -> LossTerms | list[LossTerms]:
        batch = [assigned] if isinstance(assigned, Assigned) else assigned
        names = [(i, field.name) for i, each in enumerate(batch) for field in fields(each)]
        names = [(i, name) for i, name in names if _has_gradient(getattr(batch[i], name))]

        def terms_of(leaves: Sequence[Tensor]) -> LossTerms:
            changes: list[dict[str, Any]] = [{} for _ in batch]
            for (i, name), leaf in zip(names, leaves, strict=True):
                changes[i][name] = leaf
            terms = forward([replace(each, **change) for each, change in zip(batch, changes, strict=True)])
            return {f"{i} {name}": term for i, each in enumerate(terms) for name, term in each.items()}

        flat = _forward_backward(terms_of, [getattr(batch[i], name) for i, name in names], meter)
        split: list[LossTerms] = [{} for _ in batch]
        for key, term in flat.items():
            i, _, name = key.partition(" ")
            split[int(i)][name] = term
        return split[0] if isinstance(assigned, Assigned) else split

    return measured


def _split_masks(masks: Callable[..., Tensor], meter: Meter) -> Callable[..., Tensor]:
    def measured(logits: Tensor, targets: Tensor, **others: Any) -> Tensor:
        return _forward_backward(lambda leaves: {"mask": masks(leaves[0], targets, **others)}, [logits], meter)["mask"]

    return measured


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _forward_backward(
    terms_of: Callable[[Sequence[Tensor]], LossTerms], inputs: list[Tensor], meter: Meter
) -> LossTerms:
    """Return the terms with their gradients already computed; the step's own backward pass only passes these on."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    with meter.running():
        terms = terms_of(leaves)
        total = torch.stack(list(terms.values())).sum()
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if total.requires_grad:
            gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    linear = total.new_zeros(())
    for value, gradient in zip(inputs, gradients, strict=True):
        if gradient is not None:
            linear = linear + (value * gradient).sum()
    first, *_ = terms
    values = {name: term.detach() for name, term in terms.items()}
    # The first term keeps its value and gets the gradient of all terms.
    return {**values, first: values[first] + (linear - linear.detach())}


@contextmanager
def record_inputs(model: nn.Module) -> Iterator[list[tuple[str, Assigned]]]:
    """Record the inputs of the criteria inside the context, with the names of their heads."""
    inputs: list[tuple[str, Assigned]] = []

    def record(name: str, assigned: Assigned | list[Assigned]) -> None:
        inputs.extend((name, each) for each in ([assigned] if isinstance(assigned, Assigned) else assigned))

    hooks = [
        module.register_forward_pre_hook(lambda _, arguments, name=name: record(name, arguments[0]))
        for name, module in criteria(model)
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def head_of(name: str, assigned: Assigned) -> Head:
    """Return the sizes of a criterion's input."""
    return Head(
        name=name,
        candidates=int((assigned.labels != IGNORED).sum()),
        classes=assigned.logits.shape[1],
        positives=int(assigned.positives.sum()),
    )
