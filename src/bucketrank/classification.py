"""Average Precision loss for binary and multi-label classifiers: every class is a ranking of the samples.

``L = 1/|C| sum_c AP loss of column c``, over the classes that have positives. A :class:`ScoreMemory` adds the scores of
earlier steps to the rankings, so that a small batch is compared with many negatives. :func:`fit_score_map` turns the
scores of a trained classifier into probabilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bucketrank.losses import ap_loss
from bucketrank.losses.functional import check_logits, check_settings
from bucketrank.settings.choices import DEFAULT_DELTAS, Reduction

if TYPE_CHECKING:
    from bucketrank.evaluation.calibration.mapping import ScoreMap


class ScoreMemory(nn.Module):
    """A queue of the last ``size`` samples: their detached logits and their targets.

    It is in the state of its owner, so that a resumed run continues with the same queue. Empty
    places, and entries that are NaN or infinite, have target -1, which every loss ignores.

    >>> memory = ScoreMemory(size=2, classes=1)
    >>> memory.push(torch.tensor([[0.1], [0.2], [0.3]]), torch.tensor([[1.0], [0.0], [1.0]]))
    >>> sorted(memory.logits.flatten().tolist()) == torch.tensor([0.2, 0.3]).tolist()
    True
    """

    logits: Tensor
    targets: Tensor
    next: Tensor

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        for name, value in (("size", size), ("classes", classes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"ScoreMemory: expected {name} to be an integer above 0, got {value!r}")
        self.register_buffer("logits", torch.zeros(size, classes))
        self.register_buffer("targets", torch.full((size, classes), -1.0))
        self.register_buffer("next", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def push(self, logits: Tensor, targets: Tensor) -> None:
        """Replace the oldest samples by these, of shape (B, C). Of more than ``size`` samples, the last ones stay."""
        size = len(self.logits)
        logits, targets = logits.detach()[-size:].to(self.logits), targets[-size:].to(self.targets)
        broken = ~(logits.isfinite() & targets.isfinite())
        places = (self.next + torch.arange(len(logits), device=self.next.device)) % size
        self.logits[places] = logits.masked_fill(broken, 0)
        self.targets[places] = targets.masked_fill(broken, -1)
        self.next.copy_((self.next + len(logits)) % size)

    def extra_repr(self) -> str:
        return f"size={self.logits.shape[0]}, classes={self.logits.shape[1]}"


def multilabel_ap_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    delta: float = DEFAULT_DELTAS["ap"],
    reduction: Reduction = "mean",
    memory: ScoreMemory | None = None,
) -> Tensor:
    """Multi-label AP loss, ``1/|C| sum_c AP loss of column c``, over the classes c that have positives.

    ``logits`` has the shape (B, C), or (B,) for a binary classifier. With a ``memory``, the samples in the queue take
    part in the rankings, without a gradient. The batch joins the queue afterwards. Without any positive the loss is 0,
    with gradient 0. ``reduction="none"`` gives one value per class. The other arguments are those of
    :func:`~bucketrank.ap_loss`.

    >>> logits = torch.tensor([[3.0, 0.0], [2.0, 1.0], [1.0, 2.0]])
    >>> targets = torch.tensor([[1, 1], [0, 0], [1, 0]])
    >>> # The first class has the errors 0/1 and 1/3, the second class has the error 2/3.
    >>> multilabel_ap_loss(logits, targets, delta=0, reduction="none")
    tensor([0.1667, 0.6667])
    """
    check_settings("multilabel_ap_loss", delta, "exact", reduction=reduction)
    check_logits("multilabel_ap_loss", logits, targets)
    if logits.dim() not in (1, 2):
        raise ValueError(f"multilabel_ap_loss: expected logits of shape (B, C) or (B,), got {tuple(logits.shape)}")
    if logits.dim() == 1:
        logits, targets = logits[:, None], targets[:, None]
    ranked, labels = logits, targets
    if memory is not None:
        if memory.logits.shape[1] != logits.shape[1]:
            raise ValueError(
                f"multilabel_ap_loss: expected a memory of {logits.shape[1]} classes like logits, "
                f"got {memory.logits.shape[1]}"
            )
        ranked, labels = torch.cat([logits, memory.logits]), torch.cat([targets.to(memory.targets), memory.targets])
    sizes = [len(ranked)] * ranked.shape[1]
    loss = ap_loss(ranked.T, labels.T, delta=delta, sizes=sizes, reduction=reduction)
    if memory is not None:
        memory.push(logits, targets)
    return loss


class MultilabelAPLoss(nn.Module):
    """:func:`multilabel_ap_loss` with its settings. ``memory_size`` above 0 adds a :class:`ScoreMemory` of that size.

    The memory takes part only in training mode.
    """

    def __init__(
        self,
        classes: int = 1,
        *,
        delta: float = DEFAULT_DELTAS["ap"],
        reduction: Reduction = "mean",
        memory_size: int = 0,
    ) -> None:
        super().__init__()
        check_settings("MultilabelAPLoss", delta, "exact", reduction=reduction)
        self.delta, self.reduction = delta, reduction
        self.memory = ScoreMemory(memory_size, classes) if memory_size else None

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        memory = self.memory if self.training else None
        return multilabel_ap_loss(logits, targets, delta=self.delta, reduction=self.reduction, memory=memory)

    def extra_repr(self) -> str:
        return f"delta={self.delta}, reduction={self.reduction!r}"


def fit_score_map(logits: Tensor, targets: Tensor) -> ScoreMap:
    """Fit ``sigmoid(a * logit + b)`` to each class, as probabilities that a sample is positive (Platt, 1999).

    Scores of a ranking loss have an order but no scale. Fit the map on held-out samples of shape (B, C) or (B,), at
    least 10 positives and 10 negatives per class; every ``a`` is above 0, so the order stays. Needs numpy.
    """
    # Imported when used: the losses need only torch.
    from bucketrank.evaluation.calibration.mapping import ScoreMap, fit_platt, require_both

    check_logits("fit_score_map", logits, targets)
    pairs = []
    of_classes = (each[:, None] if each.dim() == 1 else each.flatten(1) for each in (logits.detach(), targets))
    for column, labels in zip(*(each.T for each in of_classes), strict=True):
        used = labels >= 0
        right = (labels[used] > 0).cpu().numpy()
        require_both(right)
        pairs.append(fit_platt(column[used].double().cpu().numpy(), right.astype(float)))
    slopes, shifts = zip(*pairs, strict=True)
    return ScoreMap(slopes, shifts)
