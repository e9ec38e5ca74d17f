"""The ranking losses as functions.

All losses share the arguments of :func:`ap_loss`. The smoothed step H rises linearly from 0 at ``-delta`` to 1 at
``delta``. The exact method takes O((P + N) log P) time, the pairwise one O(P (P + N)), the bucketed one
O((P + N) log P + P^2). ``sizes`` are lengths, which take no memory and need no device sync, unlike a tensor with the
ranking of each entry.

The gradients are defined by identity update, not derived from the values. Without positives a loss is 0 and its
gradient is 0. If a logit that is not ignored, or the target of a positive, is NaN or infinite, the loss is NaN, and
so is the gradient at every entry that is not ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard, get_args

import torch
from torch import Tensor

from bucketrank.losses.autograd import Ranked, rank
from bucketrank.settings.choices import DEFAULT_DELTAS, ALRPMethod, Method, Reduction

METHODS: tuple[Method, ...] = get_args(Method)
ALRP_METHODS: tuple[ALRPMethod, ...] = get_args(ALRPMethod)
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

LARGEST_FLOAT = sys.float_info.max
# repr fails for integers beyond a few thousand digits.
MAX_PRINTED_BITS = 128


class RankSortTerms(NamedTuple):
    """The two terms of Rank & Sort loss. Each has its own gradient, so they can be weighted separately."""

    ranking: Tensor  # AP loss
    sorting: Tensor  # the sorting error of the positives


class ALRPTerms(NamedTuple):
    """The two terms of aLRP loss: the first trains the logits, the second the localisation errors."""

    classification: Tensor  # the ranking error, with its gradient at the logits
    localisation: Tensor  # the localisation error, with its gradient at the localisation errors


def ap_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    delta: float = DEFAULT_DELTAS["ap"],
    method: Method = "exact",
    interpolate: bool = False,
    sizes: Sequence[int] | None = None,
    reduction: Reduction = "mean",
    max_positives: int | None = None,
) -> Tensor:
    """AP loss, ``1/|P| sum_i FP(i) / rank(i)``: the mean share of negatives ranked above a positive (paper, Eq. 4).

    ``FP(i) = sum_{j in N} H(s_j - s_i)`` counts the negatives above positive i, and ``rank(i)`` is the same sum over
    all entries, including H(0) for the positive itself. ``method="bucketed"`` is the paper's Bucketed AP loss.
    ``interpolate=True`` is the original AP loss: each positive counts itself as 1 and takes the best precision at or
    below its score.

    Args:
        logits: scores before the sigmoid, of any shape.
        targets: of the same shape: above 0 for a positive, 0 for a negative, below 0 for an ignored entry.
        delta: two logits closer than this count as partly tied; at 0 logits are compared with ``>=``.
        method: ``"exact"`` (the default), ``"pairwise"`` (the definition, slower, the same numbers) or ``"bucketed"``
            (the paper's approximation).
        interpolate: compute the original AP loss, as described above.
        sizes: lengths of consecutive rankings, like the argument of ``torch.split``; by default all entries form one
            ranking.
        reduction: with ``sizes``: ``"mean"`` over the rankings that have positives (0 if none has any), or ``"none"``,
            one value per ranking.
        max_positives: upper bound on the positives of a call, all rankings together, which avoids a device sync on a
            GPU. Exceeding it yields NaN for every value and gradient.

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
    return _reduce(rank(*flat, None, loss, method, float(delta), sizes, max_positives), reduction)[0]


def rank_sort_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    delta: float = DEFAULT_DELTAS["rs"],
    method: Method = "exact",
    sizes: Sequence[int] | None = None,
    reduction: Reduction = "mean",
    max_positives: int | None = None,
) -> RankSortTerms:
    """Rank & Sort loss, ``AP loss + 1/|P| sum_i (l_S(i) - l_S*(i))``: rank, then sort by IoU label (paper, Eq. 10).

    ``ranking`` is AP loss and ``sorting`` the second sum. ``l_S(i)`` is the mean ``1 - IoU`` of the positives ranked
    above i; ``l_S*(i)`` is the same mean over only those whose IoU is at least that of i. ``method="bucketed"`` is the
    paper's Bucketed RS loss. ``targets`` holds the IoU label of a positive. A label of 0 would mark a negative:
    give a positive with IoU 0 a small label, for example with ``iou.clamp(min=1e-6)``. The other arguments are those of
    :func:`~bucketrank.ap_loss`.

    >>> logits, targets = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0.5, 0.0, 0.9])
    >>> # Sorting errors: 0 of the first entry, (0.5 + 0.1) / 2 - 0.1 of the last.
    >>> rank_sort_loss(logits, targets, delta=0)
    RankSortTerms(ranking=tensor(0.1667), sorting=tensor(0.1000))
    """
    check_settings("rank_sort_loss", delta, method, reduction=reduction, max_positives=max_positives)
    check_logits("rank_sort_loss", logits, targets, sizes)
    flat = _flat(logits, targets)
    return RankSortTerms(*_reduce(rank(*flat, None, "rs", method, float(delta), sizes, max_positives), reduction))


def alrp_loss(
    logits: Tensor,
    targets: Tensor,
    localisation: Tensor,
    *,
    delta: float = DEFAULT_DELTAS["alrp"],
    method: ALRPMethod = "exact",
    sizes: Sequence[int] | None = None,
    reduction: Reduction = "mean",
    max_positives: int | None = None,
) -> ALRPTerms:
    """aLRP loss, ``1/|P| sum_i (FP(i) + sum_{s_j >= s_i} E_j) / rank(i)``: rank by box quality (Oksuz et al., 2020).

    ``localisation`` holds the error E of each positive, in the order of ``logits[targets > 0]``, also with ``sizes``;
    1 - GIoU is the usual choice. The first term, ``classification``, is AP loss in which each positive counts itself
    as 1; its gradient also lifts a positive past badly localised ones. The second, ``localisation``, has its gradient
    at the localisation errors. There is no bucketed method. The other arguments are those of
    :func:`~bucketrank.ap_loss`.

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
    return ALRPTerms(*_reduce(rank(*flat, localisation, "alrp", method, float(delta), sizes, max_positives), reduction))


def self_balance(loss: Tensor, to: Tensor) -> Tensor:
    """Self-balancing, ``loss * (to / loss)`` with a constant factor (Oksuz et al., 2021).

    The result has the value of ``to``, which gets no gradient. A ``loss`` of 0 is returned unchanged, with its own
    gradient. Both ``loss`` and ``to`` are tensors with one value.

    >>> box = torch.tensor(0.5, requires_grad=True)
    >>> balanced = self_balance(box * 2, to=torch.tensor(3.0))
    >>> balanced.backward()
    >>> balanced.item(), box.grad.item()  # scaled by 3 / 1
    (3.0, 6.0)
    """
    for argument, value in (("loss", loss), ("to", to)):
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"self_balance: expected {argument} to be a tensor with one value, got {got}")
    value = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))  # the factor may overflow float16
    scale = torch.where(value == 0, 1, to.detach() / torch.where(value == 0, 1, value))
    return loss * scale


def _flat(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten both tensors and make them contiguous."""
    # Every step is skipped where it changes nothing: on small inputs these calls cost as much as the loss.
    if logits.dim() != 1:
        logits, targets = logits.reshape(-1), targets.reshape(-1)
    if targets.requires_grad:
        targets = targets.detach()
    return logits.contiguous(), targets.contiguous()


def _reduce(ranked: Ranked, reduction: str) -> Sequence[Tensor]:
    """Average each value over the rankings that have positives, unless ``reduction`` is ``"none"``."""
    values, counts = ranked
    if counts is None or reduction == "none":
        return values
    number = (counts > 0).sum().clamp(min=1)
    return [value.sum() / number for value in values]


def check_settings(
    name: str,
    delta: float,
    method: str,
    methods: tuple[str, ...] = METHODS,
    *,
    reduction: str = "mean",
    max_positives: int | None = None,
) -> None:
    """Raise ValueError unless these are valid settings of a ranking loss."""
    check_number(name, "delta", delta)
    check_choice(name, "method", method, methods)
    check_choice(name, "reduction", reduction, REDUCTIONS)
    if max_positives is not None and (
        isinstance(max_positives, bool) or not isinstance(max_positives, int) or max_positives < 1
    ):
        raise ValueError(f"{name}: expected max_positives to be None or an integer above 0, got {max_positives!r}")


def check_number(name: str, setting: str, value: float) -> None:
    """Raise ValueError unless ``value`` is a finite number of at least 0."""
    if not is_finite_number(value) or value < 0:
        raise ValueError(f"{name}: expected {setting} to be a finite number of at least 0, got {format_value(value)}")


def check_choice(name: str, setting: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected {setting} to be one of {', '.join(choices)}, got {value!r}")


def check_logits(name: str, logits: Tensor, targets: Tensor, sizes: Sequence[int] | None = None) -> None:
    """Raise unless ``logits`` and ``targets`` are matching tensors, and ``sizes`` cover them."""
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


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is an int or float, not a bool, that float64 can hold."""
    # Not math.isfinite: torch.compile cannot trace it for a number that changes between calls, and it raises
    # OverflowError for very large integers.
    return not isinstance(value, bool) and isinstance(value, (int, float)) and -LARGEST_FLOAT <= value <= LARGEST_FLOAT


def format_value(value: object) -> str:
    """Return ``repr(value)``, or the bit length of an integer with too many digits to print."""
    if isinstance(value, int) and value.bit_length() > MAX_PRINTED_BITS:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)
