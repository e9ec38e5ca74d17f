"""The candidates of one image as a run's loss sees them in training: logits, targets and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bucketrank.detectors import Detector
from bucketrank.detectors.co_detr.detector import CoDETR
from bucketrank.detectors.criterion import Assigned, Criterion
from bucketrank.ops.assignment import IGNORED
from bucketrank.ops.boxes import paired_iou

CLASSIFYING = ("rank", "sort", "cls")  # the terms of a head that train its logits


@dataclass(frozen=True)
class Candidates:
    """Every class of every candidate that is not ignored, in falling order of the logits."""

    logits: Tensor  # (n,)
    gradients: Tensor  # (n,)
    positives: Tensor  # (n,) whether an object was assigned
    ious: Tensor  # (n,) of the predicted box with that object; 0 of negatives
    classes: Tensor  # (n,) from 0
    loss: float


def candidates(model: Detector, picture: Tensor, target: dict[str, Any]) -> Candidates | None:
    """Those of the head whose scores become the detections, with the image as a batch of its own.

    None where the classes share a softmax: there is no list of logits then. The model is left in evaluation mode.
    """
    criterion, call = deciding(model)
    if criterion is None or criterion.softmax:
        return None
    seen: list[Assigned] = []

    def keep(module: nn.Module, given: tuple[Assigned]) -> None:  # noqa: ARG001 (torch's signature)
        seen.append(given[0])

    handle = criterion.register_forward_pre_hook(keep)
    try:
        with _as_in_training(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # score-based recipes may draw a sample
            model([picture], [target])
    finally:
        handle.remove()
    return _ranked(criterion, seen[call])


def deciding(model: Detector) -> tuple[Criterion | None, int]:
    """The criterion of the head whose scores become the detections, and which of its calls that is."""
    if isinstance(model, CoDETR):
        # The encoder is compared first, then the layers of the decoder, of which the last detects.
        return model.criterion, len(model.decoder.layers)
    every = [module for module in model.modules() if isinstance(module, Criterion)]
    return (every[-1] if every else None), -1  # heads follow each other: the last one detects


def _ranked(criterion: Criterion, found: Assigned) -> Candidates:
    with torch.enable_grad():
        logits = found.logits.detach().clone().requires_grad_()
        terms = criterion(replace(found, logits=logits))
        loss = torch.stack([term for name, term in terms.items() if name in CLASSIFYING]).sum()
        (gradient,) = torch.autograd.grad(loss, logits, allow_unused=True)
    gradients = torch.zeros_like(logits) if gradient is None else gradient
    rows = torch.where(found.positives)[0]
    ious = torch.zeros_like(found.logits)
    ious[rows, found.labels[rows]] = paired_iou(found.boxes, found.objects).to(ious.dtype)
    positives = torch.zeros_like(found.logits, dtype=torch.bool)
    positives[rows, found.labels[rows]] = True
    classes = torch.arange(found.logits.shape[1], device=ious.device).expand_as(ious)
    taken = found.labels != IGNORED
    order = found.logits[taken].flatten().argsort(descending=True, stable=True)
    logit, grad, positive, iou, kind = (
        values.detach()[taken].flatten()[order].cpu() for values in (found.logits, gradients, positives, ious, classes)
    )
    return Candidates(logit, grad, positive, iou, kind, float(loss.detach()))


@contextmanager
def _as_in_training(model: Detector) -> Iterator[None]:
    """In training mode, except what would change the model or the image: batch norms, dropout, random sizes."""
    model.train()
    for module in [model.transform, *model.modules()]:
        if module is model.transform or isinstance(module, _BatchNorm | nn.Dropout):
            module.eval()
    try:
        yield
    finally:
        model.eval()
