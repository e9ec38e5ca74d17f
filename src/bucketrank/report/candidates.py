"""The training candidates of one image: logits, assigned objects, and the gradient of the run's loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bucketrank.detectors import Detector
from bucketrank.detectors.criterion import Assigned, Criterion
from bucketrank.ops.assignment import IGNORED
from bucketrank.ops.boxes import paired_iou


@dataclass(frozen=True)
class TrainingCandidates:
    """One entry per class of each candidate that is not ignored, highest logit first."""

    logits: Tensor  # (n,)
    gradients: Tensor  # (n,)
    positives: Tensor  # (n,) whether an object of this class was assigned
    ious: Tensor  # (n,) IoU of the predicted box with that object; 0 for negatives
    classes: Tensor  # (n,) class indices from 0
    loss: float


def candidates(model: Detector, image: Tensor, target: dict[str, Any]) -> TrainingCandidates | None:
    """Return the candidates of the head whose scores become the detections, with ``image`` as a batch of one.

    Returns None for a head with a softmax over the classes, which has no ranked list of logits, and for a model of
    another library, whose loss shows no candidates. The model is left in evaluation mode.
    """
    detecting = model.detecting_criterion()
    if detecting is None or detecting[0].softmax:
        return None
    criterion, call = detecting
    calls: list[Assigned] = []

    def record_call(module: nn.Module, inputs: tuple[Assigned | list[Assigned]]) -> None:  # noqa: ARG001 (torch's)
        calls.extend([inputs[0]] if isinstance(inputs[0], Assigned) else inputs[0])

    handle = criterion.register_forward_pre_hook(record_call)
    try:
        with _as_in_training(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # heads with a score-based loss may sample their candidates
            model([image], [target])
    finally:
        handle.remove()
    return _ranked(criterion, calls[call])


def _ranked(criterion: Criterion, assigned: Assigned) -> TrainingCandidates:
    with torch.enable_grad():
        logits = assigned.logits.detach().clone().requires_grad_()
        terms = criterion(replace(assigned, logits=logits))
        loss = criterion.classification_loss(terms)
        (gradient,) = torch.autograd.grad(loss, logits, allow_unused=True)
    gradients = torch.zeros_like(logits) if gradient is None else gradient
    rows = torch.where(assigned.positives)[0]
    ious = torch.zeros_like(assigned.logits)
    ious[rows, assigned.labels[rows]] = paired_iou(assigned.boxes, assigned.objects).to(ious.dtype)
    positives = torch.zeros_like(assigned.logits, dtype=torch.bool)
    positives[rows, assigned.labels[rows]] = True
    classes = torch.arange(assigned.logits.shape[1], device=ious.device).expand_as(ious)
    kept = assigned.labels != IGNORED
    order = assigned.logits[kept].flatten().argsort(descending=True, stable=True)
    logits, gradients, positives, ious, classes = (
        values.detach()[kept].flatten()[order].cpu()
        for values in (assigned.logits, gradients, positives, ious, classes)
    )
    return TrainingCandidates(logits, gradients, positives, ious, classes, float(loss.detach()))


@contextmanager
def _as_in_training(model: Detector) -> Iterator[None]:
    """Put the model in training mode, except for batch norms, dropout and the transform.

    Batch norms would change their statistics, dropout the logits, and the transform the size of the image.
    """
    model.train()
    for module in [model.transform, *model.modules()]:
        if module is model.transform or isinstance(module, _BatchNorm | nn.Dropout):
            module.eval()
    try:
        yield
    finally:
        model.eval()
