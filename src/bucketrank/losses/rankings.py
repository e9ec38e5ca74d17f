"""The values of all rankings in a call, and their prepared backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bucketrank.losses.backend import METHODS, comparison_of, triton_for
from bucketrank.losses.comparison import (
    Comparison,
    can_place_edges,
    check_finite,
    comparable,
    on_host,
    positives_by_score,
    precise,
)
from bucketrank.losses.pairwise import Pairwise
from bucketrank.losses.ragged import MAX_PAIRS, Ragged, groups
from bucketrank.losses.terms import RANKING_LOSSES, Gradients, check_localisation

if TYPE_CHECKING:
    from bucketrank.losses.fused import Fused  # imports numba, which is optional


class Settings(NamedTuple):
    """The settings of one ranking loss call.

    ``sizes`` are the lengths of consecutive rankings. None means a single ranking, with values of no dimension.
    """

    loss: str
    method: str
    backend: str
    delta: float
    sizes: Sequence[int] | None
    max_positives: int | None

    def for_triton(self, logits: Tensor) -> dict[str, Any]:
        """Return the settings as the Triton kernels take them."""
        sizes = (logits.numel(),) if self.sizes is None else tuple(self.sizes)
        return {"loss": self.loss, "delta": self.delta, "sizes": sizes, "max_positives": self.max_positives}


class Prepared(Protocol):
    """The state that a forward pass keeps for the backward pass."""

    @property
    def counts(self) -> Sequence[int] | Tensor:
        """Positives of each ranking."""
        ...

    def backward(self, first: Tensor | None, second: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the gradients at the logits and the localisation errors, given those at the values; None is zero."""
        ...


def rank_all(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, settings: Settings
) -> tuple[tuple[Tensor, ...], Prepared]:
    """Compute the one or two values of each ranking, and prepare the backward pass."""
    triton = triton_for(settings.method, settings.backend, logits)
    if triton is not None:
        first, second, prepared = triton.rank_with_triton(logits, targets, localisation, **settings.for_triton(logits))
        values = (first,) if second is None else (first, second)
        return tuple(value.view(()) for value in values) if settings.sizes is None else values, prepared
    method: Any = comparison_of(settings.method, settings.backend, logits)
    if method.takes_sizes:
        return _rank_together(method, logits, targets, localisation, settings)
    if settings.sizes is None:
        return _rank_alone(method(logits, targets, settings.delta), logits, targets, localisation, settings)
    if settings.method == "exact" and on_host(logits):
        return _rank_in_groups(logits, targets, localisation, settings, settings.sizes)
    parts = _split(logits, targets, settings.sizes)
    comparisons = _compare_each(logits, targets, parts, settings)
    counts = [len(comparison.scores) for comparison in comparisons]
    check_localisation(localisation, sum(counts))
    errors = localisation.split(counts) if localisation is not None and counts else [None] * len(parts)
    overfull = settings.max_positives is not None and sum(counts) > settings.max_positives
    ranked = [
        rank_one(*part, comparison, error, settings.loss, overfull=overfull)
        for part, comparison, error in zip(parts, comparisons, errors, strict=True)
    ]
    return _join(logits, ranked)


def _rank_in_groups(
    logits: Tensor, targets: Tensor, localisation: Tensor | None, settings: Settings, sizes: Sequence[int]
) -> tuple[tuple[Tensor, ...], Prepared]:
    """Rank groups of small rankings together, and large rankings one by one."""
    starts = torch.tensor([0, *accumulate(sizes)])
    before = torch.searchsorted((targets > 0).nonzero().squeeze(1), starts).tolist()
    check_localisation(localisation, before[-1])
    overfull = settings.max_positives is not None and before[-1] > settings.max_positives
    ranked = []
    for first, stop in groups(sizes, [after - own for own, after in pairwise(before)]):
        entries = slice(int(starts[first]), int(starts[stop]))
        part = logits[entries], targets[entries]
        errors = None if localisation is None else localisation[before[first] : before[stop]]
        if sizes[first] * (before[first + 1] - before[first]) > MAX_PAIRS:
            alone = settings._replace(sizes=None, max_positives=0 if overfull else None)
            ranked.append(rank_all(*part, errors, alone))
        else:
            comparison = Ragged(*part, settings.delta, sizes[first:stop], overfull=overfull)
            ranked.append(_compute(comparison, part[1], errors, settings.loss))
    return _join(logits, ranked)


def _rank_together(
    method: type[Fused], logits: Tensor, targets: Tensor, localisation: Tensor | None, settings: Settings
) -> tuple[tuple[Tensor, ...], Prepared]:
    """Rank all rankings in compiled loops, or each separately if delta is too small for some logits."""
    comparison = method(logits, targets, settings.delta, settings.sizes, settings.max_positives)
    check_localisation(localisation, len(comparison.scores))
    if comparison.is_accurate():
        return _compute(comparison, targets, localisation, settings.loss)
    if settings.sizes is None:
        return _rank_alone(Pairwise(logits, targets, settings.delta), logits, targets, localisation, settings)
    counts = comparison.counts.tolist()
    errors = [None] * len(counts) if localisation is None else localisation.split(counts)
    alone = settings._replace(sizes=None, max_positives=0 if comparison.overfull else None)
    parts = _split(logits, targets, settings.sizes)
    return _join(logits, [rank_all(*part, error, alone) for part, error in zip(parts, errors, strict=True)])


def _rank_alone(
    comparison: Comparison, logits: Tensor, targets: Tensor, localisation: Tensor | None, settings: Settings
) -> tuple[tuple[Tensor, ...], Prepared]:
    """Rank one ranking by this comparison, or by the definition if the method is not accurate enough."""
    if not comparison.is_accurate():
        comparison = Pairwise(logits, targets, settings.delta)
    positives = len(comparison.scores)
    check_localisation(localisation, positives)
    overfull = settings.max_positives is not None and positives > settings.max_positives
    return rank_one(logits, targets, comparison, localisation, settings.loss, overfull=overfull)


def _split(logits: Tensor, targets: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return [*zip(logits.split(list(sizes)), targets.split(list(sizes)), strict=True)] if sizes else []


def _join(logits: Tensor, ranked: Sequence[tuple[tuple[Tensor, ...], Prepared]]) -> tuple[tuple[Tensor, ...], Prepared]:
    # A degenerate ranking has two values, even if the loss has one.
    values = tuple(
        torch.cat([part.view(-1) for part in value]) for value in zip(*(values for values, _ in ranked), strict=False)
    )
    return values or (logits.new_zeros(0), logits.new_zeros(0)), Batch(logits, [prepared for _, prepared in ranked])


class DegenerateRanking:
    """A ranking without positives, or with an undefined loss. All its values are ``value``, which is 0 or NaN."""

    def __init__(self, logits: Tensor, targets: Tensor, value: Tensor, positives: int) -> None:
        self.logits, self.targets, self.counts = logits, targets, [positives]
        self.zero_or_nan = value * 0

    def backward(self, first: Tensor | None, second: Tensor | None) -> tuple[Tensor, Tensor | None]:  # noqa: ARG002
        # 0, or NaN at each entry that is not ignored. The localisation errors get a gradient too, as DDP waits for it.
        at_logits = self.zero_or_nan.expand_as(self.logits).masked_fill(self.targets < 0, 0)
        return at_logits, self.zero_or_nan.repeat(self.counts[0])


class Ranking:
    """The backward pass of a comparison: one ranking, or all rankings of a call.

    It does not hold the values. Autograd attaches them to the node that holds the ranking, and in such a reference
    cycle the memory of the gradient would wait for the garbage collector.
    """

    def __init__(self, targets: Tensor, comparison: Comparison, gradients: Gradients) -> None:
        self.targets, self.comparison, self.gradients = targets, comparison, gradients

    @property
    def counts(self) -> Sequence[int]:
        return self.comparison.positives_per_ranking()

    def backward(self, first: Tensor | None, second: Tensor | None) -> tuple[Tensor, Tensor | None]:
        comparison, gradients = self.comparison, self.gradients
        by_first = 0 if first is None else comparison.share(first)
        own = gradients.positives * by_first
        at_localisation = None
        if second is not None:
            by_second = comparison.share(second)
            if gradients.second_positives is not None:
                own = own + gradients.second_positives * by_second
            if gradients.localisation is not None:
                at_localisation = comparison.by_position(gradients.localisation * by_second)
        at_logits = comparison.spread(gradients.negative_weights * by_first, own)
        if comparison.taint is not None:
            at_logits = at_logits.add_(comparison.taint).masked_fill_(self.targets < 0, 0)
            at_localisation = None if at_localisation is None else at_localisation + comparison.taint
        return at_logits, at_localisation

    def second_at_logits(self, second: Tensor) -> Tensor:
        """Return the gradient of the second values at the logits; it is not 0 only at the positives."""
        at_positives = torch.as_tensor(self.gradients.second_positives * self.comparison.share(second))
        gradient = torch.zeros_like(self.targets)
        return gradient.index_copy_(0, self.comparison.index, at_positives.to(gradient.dtype))


def unit_gradients(
    prepared: Prepared, value: Tensor, localisation: Tensor | None, loss: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the first value and of the second at the logits, and of the second at the errors.

    What the loss does not have is empty.
    """
    one = torch.ones_like(value)
    at_logits, at_errors = prepared.backward(one, None if localisation is None else one)
    second = at_logits.new_empty(0)
    if loss == "rs":
        # A second backward pass would fill the buckets again.
        if isinstance(prepared, Ranking):
            second = prepared.second_at_logits(one)
        else:
            second, _ = prepared.backward(None, one)
    if localisation is None or at_errors is None:
        at_errors = at_logits.new_empty(0)
    return at_logits, second, at_errors.to(at_logits.dtype)


def rank_one(
    logits: Tensor, targets: Tensor, comparison: Comparison, localisation: Tensor | None, loss: str, *, overfull: bool
) -> tuple[tuple[Tensor, ...], Ranking | DegenerateRanking]:
    """Compute the values of one ranking and prepare its backward pass; ``overfull`` makes the values NaN."""
    positives, taint = len(comparison.scores), comparison.taint
    undefined = overfull or not comparison.finite
    if undefined or positives == 0:
        value = logits.new_full((), torch.nan if undefined else 0.0)
        value = value if taint is None else value + taint
        return (value, value.clone()), DegenerateRanking(logits, targets, value, positives)
    values, ranking = _compute(comparison, targets, localisation, loss)
    return values if taint is None else tuple(value + taint for value in values), ranking


def _compute(
    comparison: Comparison, targets: Tensor, localisation: Tensor | None, loss: str
) -> tuple[tuple[Tensor, ...], Ranking]:
    compute_terms = RANKING_LOSSES[loss]
    if localisation is None:
        first, second, gradients = compute_terms(comparison)
    else:
        first, second, gradients = compute_terms(comparison, comparison.by_score(localisation.detach()))
    means = comparison.mean(first), *(() if second is None else (comparison.mean(second),))
    return means, Ranking(targets, comparison, gradients)


class Batch:
    """Rankings and groups of rankings, each with its own backward pass."""

    def __init__(self, logits: Tensor, rankings: Sequence[Prepared]) -> None:
        self.logits, self.rankings = logits, rankings

    @property
    def counts(self) -> Sequence[int]:
        return [int(count) for ranking in self.rankings for count in ranking.counts]

    def backward(self, first: Tensor | None, second: Tensor | None) -> tuple[Tensor, Tensor | None]:
        counts = [len(ranking.counts) for ranking in self.rankings]
        none = [None] * len(counts)
        upstream = zip(*(none if each is None else each.split(counts) for each in (first, second)), strict=True)
        parts = [ranking.backward(*gradients) for ranking, gradients in zip(self.rankings, upstream, strict=True)]
        if not parts:
            return torch.zeros_like(self.logits), self.logits.new_zeros(0)
        at_localisation = [errors for _, errors in parts if errors is not None]
        return (
            torch.cat([at_logits for at_logits, _ in parts]),
            torch.cat(at_localisation) if second is not None and at_localisation else None,
        )


def _compare_each(
    logits: Tensor, targets: Tensor, parts: list[tuple[Tensor, Tensor]], settings: Settings
) -> list[Comparison]:
    method = METHODS[settings.method]
    if on_host(logits) or not parts:
        each = [method(*part, settings.delta) for part in parts]
        return [
            comparison if comparison.is_accurate() else Pairwise(*part, settings.delta)
            for part, comparison in zip(parts, each, strict=True)
        ]
    # Two device syncs for all rankings together, not two per ranking. The first is for the positions of the positives.
    index = positives_by_score(logits, (targets > 0).nonzero().squeeze(1))
    starts = list(accumulate((len(part) for part, _ in parts[:-1]), initial=0))
    first = torch.tensor(starts).to(logits.device, non_blocking=True)
    ranking, order = (torch.searchsorted(first, index, right=True) - 1).sort(stable=True)
    index = index[order]
    counts = torch.zeros_like(first).index_add_(0, ranking, torch.ones_like(ranking))
    largest = comparable(logits[index]).abs().amax() if index.numel() else logits.new_zeros(())
    largest = precise(largest)
    *lengths, largest_score = torch.cat([precise(counts), largest.view(1)]).tolist()
    if method.has_edges and not can_place_edges(largest_score, settings.delta, largest.dtype):
        method = Pairwise
    comparisons: list[Comparison] = []
    positions = (index - first[ranking]).split([int(length) for length in lengths])
    for part, part_index in zip(parts, positions, strict=True):
        comparison = method(*part, settings.delta, part_index)
        comparison.finite, comparison.taint = check_finite(*part)
        comparisons.append(comparison)
    return comparisons
