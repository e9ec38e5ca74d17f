"""The ranking losses as functions.

All losses share one convention. ``logits`` and ``targets`` have the same shape, any shape, and are ranked together as
one list. A target above 0 marks a positive (Rank & Sort reads its value as the IoU label), 0 a negative, below 0 an
entry to ignore. ``delta`` is half the width of the ramp of the smoothed step H; at 0 logits are compared with ``>=``.
``method`` is ``"exact"`` (O((P + N) log P), the default), ``"pairwise"`` (the definition, O(P (P + N)), the same
numbers) or ``"bucketed"`` (the paper's approximation, O((P + N) log P + P^2)).

``sizes`` ranks parts of the list apart from each other: the lengths of consecutive rankings, like the argument of
``torch.split``. Lengths, unlike a tensor with the ranking of each entry, take no memory and are known without reading
from the device. With ``reduction="none"`` each term has one value per ranking; with ``"mean"`` it is their mean over
the rankings that have positives, 0 if none has.

``max_positives`` is a capacity: the most positives that one call, with all its rankings, may have. More of them make
every value and gradient NaN. On a GPU the host then does not have to wait for their number.

The gradients are defined by identity update, not derived from the values. Without positives a loss is 0 and its
gradient is 0. If a logit that is not ignored, or the target of a positive, is NaN or infinite, the loss is NaN, and
so is the gradient at every entry that is not ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from bucketrank.choices import ALRPMethod, Method, Reduction
from bucketrank.losses.autograd import rank
from bucketrank.losses.numbers import format_value, is_finite_number

ALRP_METHODS: tuple[ALRPMethod, ...] = get_args(ALRPMethod)
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


class RankSortTerms(NamedTuple):
    """The two terms of Rank & Sort loss. Each has its own gradient, so each can have its own weight.

    Attributes:
        ranking: AP loss.
        sorting: the sorting error of the positives.
    """

    ranking: Tensor
    sorting: Tensor


class ALRPTerms(NamedTuple):
    """The two terms of aLRP loss: the first trains the logits, the second the localisation errors.

    Attributes:
        classification: the ranking error, with its gradient at the logits.
        localisation: the localisation error, with its gradient at the localisation errors.
    """

    classification: Tensor
    localisation: Tensor


def ap_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    delta: float = 1.0,
    method: Method = "exact",
    interpolate: bool = False,
    sizes: Sequence[int] | None = None,
    reduction: Reduction = "mean",
    max_positives: int | None = None,
) -> Tensor:
    """Average Precision loss: the mean, over positives, of the share of negatives ranked above (paper, Eq. 4).

    ``L = 1/|P| sum_i FP(i) / rank(i)`` with ``FP(i) = sum_{j in N} H(s_j - s_i)`` and ``rank(i)`` the same sum over
    all entries, the positive itself included as H(0). ``method="bucketed"`` is the paper's Bucketed AP loss.
    ``interpolate=True`` is the original AP loss: each positive counts itself as 1 and takes the best precision at or
    below its score.

    Args:
        logits: scores before the sigmoid, of any shape; all entries are ranked together as one list.
        targets: of the same shape: above 0 for a positive, 0 for a negative, below 0 for an entry to ignore.
        delta: half the width of the ramp of the smoothed step H; at 0 logits are compared with ``>=``.
        method: ``"exact"`` (the default), ``"pairwise"`` (the definition, slower, the same numbers) or ``"bucketed"``
            (the paper's approximation).
        interpolate: compute the original AP loss, as described above.
        sizes: lengths of consecutive rankings, like the argument of ``torch.split``; by default all entries are one
            ranking.
        reduction: with ``sizes``: ``"mean"`` over the rankings that have positives, or ``"none"``, one value per
            ranking.
        max_positives: the most positives that one call may have; more of them make the loss NaN. On a GPU the host then
            does not wait for their number.

    >>> logits, targets = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 1.0])
    >>> # The error of the first positive is 0/1, that of the second 1/3.
    >>> ap_loss(logits, targets, delta=0)
    tensor(0.1667)
    >>> # Two rankings: the first entry alone, and the other two.
    >>> ap_loss(logits, targets, delta=0, sizes=[1, 2], reduction="none")
    tensor([0.0000, 0.5000])
    """
    check_settings("ap_loss", delta, method, reduction=reduction, max_positives=max_positives)
    check_logits("ap_loss", logits, targets, sizes)
    flat = _flat(logits, targets)
    loss = "interpolated_ap" if interpolate else "ap"
    first, *_ = rank(*flat, None, loss, method, float(delta), sizes, max_positives)
    return first if sizes is None else _reduce([first], flat[1], sizes, reduction)[0]


def rank_sort_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    delta: float = 0.5,
    method: Method = "exact",
    sizes: Sequence[int] | None = None,
    reduction: Reduction = "mean",
    max_positives: int | None = None,
) -> RankSortTerms:
    """Rank & Sort loss: AP loss, plus a term that sorts the positives by their IoU labels (paper, Eq. 10).

    ``ranking`` is AP loss. ``sorting`` is the mean over positives of ``l_S(i) - l_S*(i)``: the average ``1 - IoU``
    of the positives ranked above i, minus the same average over only those whose IoU is at least that of i.
    ``method="bucketed"`` is the paper's Bucketed RS loss. A positive of IoU 0 would count as a negative: give it a
    small label instead, for example with ``iou.clamp(min=1e-6)``.

    Args:
        logits: scores before the sigmoid, of any shape; all entries are ranked together as one list.
        targets: of the same shape: the IoU label of a positive, 0 for a negative, below 0 for an entry to ignore.
        delta: half the width of the ramp of the smoothed step H; at 0 logits are compared with ``>=``.
        method: ``"exact"`` (the default), ``"pairwise"`` (the definition, slower, the same numbers) or ``"bucketed"``
            (the paper's approximation).
        sizes: lengths of consecutive rankings, like the argument of ``torch.split``; by default all entries are one
            ranking.
        reduction: with ``sizes``: ``"mean"`` over the rankings that have positives, or ``"none"``, one value per
            ranking.
        max_positives: the most positives that one call may have; more of them make the loss NaN. On a GPU the host then
            does not wait for their number.

    >>> logits, targets = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0.5, 0.0, 0.9])
    >>> # Sorting errors: 0 of the first entry, (0.5 + 0.1) / 2 - 0.1 of the last.
    >>> rank_sort_loss(logits, targets, delta=0)
    RankSortTerms(ranking=tensor(0.1667), sorting=tensor(0.1000))
    """
    check_settings("rank_sort_loss", delta, method, reduction=reduction, max_positives=max_positives)
    check_logits("rank_sort_loss", logits, targets, sizes)
    flat = _flat(logits, targets)
    values = rank(*flat, None, "rs", method, float(delta), sizes, max_positives)
    return RankSortTerms(*(values if sizes is None else _reduce(values, flat[1], sizes, reduction)))


def alrp_loss(
    logits: Tensor,
    targets: Tensor,
    localisation: Tensor,
    *,
    delta: float = 1.0,
    method: ALRPMethod = "exact",
    sizes: Sequence[int] | None = None,
    reduction: Reduction = "mean",
    max_positives: int | None = None,
) -> ALRPTerms:
    """Average Localisation-Recall-Precision loss (Oksuz et al., 2020), which ranks classification and boxes together.

    ``localisation`` holds one error per positive, in the order of ``logits[targets > 0]``, also with ``sizes``;
    1 - GIoU is the usual choice. ``classification`` is AP loss in which each positive counts itself as 1; its gradient
    also lifts a positive past badly localised ones. ``localisation`` is the mean over positives i of ``sum of
    localisation_j over s_j >= s_i, divided by rank(i)``; its gradient is at the localisation errors. There is no
    bucketed method.

    Args:
        logits: scores before the sigmoid, of any shape; all entries are ranked together as one list.
        targets: of the same shape: above 0 for a positive, 0 for a negative, below 0 for an entry to ignore.
        localisation: one error per positive, in the order of ``logits[targets > 0]``.
        delta: half the width of the ramp of the smoothed step H; at 0 logits are compared with ``>=``.
        method: ``"exact"`` (the default) or ``"pairwise"`` (the definition, slower, the same numbers).
        sizes: lengths of consecutive rankings, like the argument of ``torch.split``; by default all entries are one
            ranking.
        reduction: with ``sizes``: ``"mean"`` over the rankings that have positives, or ``"none"``, one value per
            ranking.
        max_positives: the most positives that one call may have; more of them make the loss NaN. On a GPU the host then
            does not wait for their number.

    >>> logits, targets = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 1.0])
    >>> # The localisation term is (0.2 / 1 + (0.2 + 0.4) / 3) / 2.
    >>> alrp_loss(logits, targets, torch.tensor([0.2, 0.4]), delta=0)
    ALRPTerms(classification=tensor(0.1667), localisation=tensor(0.2000))
    """
    check_settings("alrp_loss", delta, method, ALRP_METHODS, reduction=reduction, max_positives=max_positives)
    check_logits("alrp_loss", logits, targets, sizes)
    if not isinstance(localisation, Tensor) or not localisation.is_floating_point():
        raise TypeError(f"alrp_loss: expected localisation to be a tensor of floats, got {_describe(localisation)}")
    if localisation.device != logits.device:
        raise ValueError(f"alrp_loss: expected localisation on {logits.device} like logits, got {localisation.device}")
    if localisation.dim() != 1:
        raise ValueError(
            "alrp_loss: expected localisation of one dimension, one error for each of logits[targets > 0], "
            f"got shape {tuple(localisation.shape)}"
        )
    flat = _flat(logits, targets)
    values = rank(*flat, localisation, "alrp", method, float(delta), sizes, max_positives)
    return ALRPTerms(*(values if sizes is None else _reduce(values, flat[1], sizes, reduction)))


def _flat(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors flat and contiguous, in a dtype of at least float32 that rounds neither."""
    # Each step only where it is needed: on small inputs these calls cost as much as the loss.
    if logits.dim() != 1:
        logits, targets = logits.reshape(-1), targets.reshape(-1)
    if not logits.dtype == targets.dtype == torch.float32:
        dtype = torch.promote_types(torch.promote_types(logits.dtype, targets.dtype), torch.float32)
        logits, targets = logits.to(dtype), targets.to(dtype)
    if targets.requires_grad:
        targets = targets.detach()
    return logits.contiguous(), targets.contiguous()


def _reduce(values: Sequence[Tensor], targets: Tensor, sizes: Sequence[int], reduction: str) -> Sequence[Tensor]:
    """Return the values of each ranking, or the mean of each value over the rankings with positives."""
    if reduction == "none" or not sizes:
        return values if reduction == "none" else [value.sum() for value in values]
    positive = targets > 0
    if all(size == sizes[0] for size in sizes):
        ranked = positive.view(len(sizes), sizes[0]).any(1)
    else:
        ranked = torch.stack([part.any() for part in positive.split(list(sizes))])
    number = ranked.sum().clamp(min=1)
    return [value.sum() / number for value in values]


def check_settings(
    name: str,
    delta: float,
    method: str,
    methods: tuple[str, ...] = get_args(Method),
    *,
    reduction: str = "mean",
    max_positives: int | None = None,
) -> None:
    """Raise unless these are valid settings of a ranking loss."""
    if not is_finite_number(delta) or delta < 0:
        raise ValueError(f"{name}: expected delta to be a finite number of at least 0, got {format_value(delta)}")
    if method not in methods:
        raise ValueError(f"{name}: expected method to be one of {', '.join(methods)}, got {method!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: expected reduction to be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if max_positives is not None and (
        isinstance(max_positives, bool) or not isinstance(max_positives, int) or max_positives < 1
    ):
        raise ValueError(f"{name}: expected max_positives to be None or an integer above 0, got {max_positives!r}")


def check_logits(name: str, logits: Tensor, targets: Tensor, sizes: Sequence[int] | None = None) -> None:
    """Raise unless ``logits`` and ``targets`` are tensors that fit each other, and ``sizes`` fit them."""
    for argument, value in (("logits", logits), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected {argument} to be a tensor, got {_describe(value)}")
    if not logits.is_floating_point():
        raise TypeError(f"{name}: expected logits of a float dtype, got {logits.dtype}; convert with logits.float()")
    if targets.is_complex():
        raise TypeError(f"{name}: expected real targets, got {targets.dtype}")
    if targets.shape != logits.shape:
        raise ValueError(
            f"{name}: expected targets of shape {tuple(logits.shape)} like logits, got {tuple(targets.shape)}; "
            "give every logit a target: above 0 for a positive, 0 for a negative, -1 to ignore it"
        )
    if targets.device != logits.device:
        raise ValueError(
            f"{name}: expected targets on {logits.device} like logits, got {targets.device}; "
            "move them with targets.to(logits.device)"
        )
    if sizes is not None:
        _check_sizes(name, sizes, logits.numel())


def _check_sizes(name: str, sizes: Sequence[int], entries: int) -> None:
    if not isinstance(sizes, (list, tuple)) or not all(
        isinstance(size, (int, torch.SymInt)) and not isinstance(size, bool) for size in sizes
    ):
        raise TypeError(
            f"{name}: expected sizes to be a list or tuple of integers, the lengths of consecutive rankings, got "
            f"{sizes!r}"
        )
    if any(size < 0 for size in sizes):
        raise ValueError(f"{name}: expected sizes of at least 0, got {list(sizes)}")
    if sum(sizes) != entries:
        raise ValueError(
            f"{name}: expected sizes whose sum is the number of logits, {entries}, got {list(sizes)}, whose sum is "
            f"{sum(sizes)}"
        )


def _describe(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
