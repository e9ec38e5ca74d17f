"""The definitions, read directly: full matrices and loops in float64. Shares no code with the package."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


def step(x: Tensor, delta: float) -> Tensor:
    if delta == 0:
        return (x >= 0).double()
    return torch.clamp(x / (2 * delta) + 0.5, 0, 1)


class Answer(NamedTuple):
    """Values of the terms, and the gradient of each with respect to the logits."""

    values: list[Tensor]
    gradients: list[Tensor]


def _split(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s, t = logits.detach().double(), targets.detach().double()
    return s, t, (t > 0).nonzero()[:, 0], (t == 0).nonzero()[:, 0]


def rank_sort(logits: Tensor, targets: Tensor, delta: float) -> Answer:
    s, t, pos, neg = _split(logits, targets)
    ranking_gradient, sorting_gradient = torch.zeros_like(s), torch.zeros_like(s)
    ranking = sorting = torch.zeros((), dtype=torch.float64)
    for i in pos:
        above_neg, above_pos = step(s[neg] - s[i], delta), step(s[pos] - s[i], delta)
        false_positives, rank_pos = above_neg.sum(), above_pos.sum()
        error = false_positives / (rank_pos + false_positives)
        ranking = ranking + error / len(pos)
        ranking_gradient[i] -= error / len(pos)
        if false_positives > 0:
            ranking_gradient[neg] += error * (above_neg / false_positives) / len(pos)
        labels = t[pos]
        better = above_pos * (labels >= t[i])
        worse = above_pos * (labels < t[i])
        current = (above_pos * (1 - labels)).sum() / rank_pos
        target = (better * (1 - labels)).sum() / better.sum()
        sorting = sorting + (current - target) / len(pos)
        if worse.sum() > 0:
            sorting_gradient[i] -= (current - target) / len(pos)
            sorting_gradient[pos] += (current - target) * (worse / worse.sum()) / len(pos)
    return Answer([ranking, sorting], [ranking_gradient, sorting_gradient])


def ap(logits: Tensor, targets: Tensor, delta: float) -> Answer:
    both = rank_sort(logits, targets, delta)
    return Answer(both.values[:1], both.gradients[:1])


def _precisions(s: Tensor, pos: Tensor, neg: Tensor, i: int, delta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Comparisons with the negatives, with the other positives, and the rank, the positive itself counted as 1."""
    above_neg = step(s[neg] - s[i], delta)
    above_pos = step(s[pos] - s[i], delta)
    above_pos[pos == i] = 0
    return above_neg, above_pos, 1 + above_pos.sum() + above_neg.sum()


def interpolated_ap(logits: Tensor, targets: Tensor, delta: float) -> Answer:
    s, _, pos, neg = _split(logits, targets)
    gradient, value, best = torch.zeros_like(s), s.new_zeros(()), s.new_tensor(-1.0)
    for i in pos[s[pos].argsort()].tolist():
        above_neg, _, rank = _precisions(s, pos, neg, i, delta)
        precision = 1 - above_neg.sum() / rank
        factor = s.new_tensor(1.0)
        if best <= precision:
            best = precision
        else:
            factor = (1 - best) / (1 - precision)
        value = value + (1 - best) / len(pos)
        gradient[i] -= (1 - best) / len(pos)
        gradient[neg] += factor * above_neg / rank / len(pos)
    return Answer([value], [gradient])


def alrp(logits: Tensor, targets: Tensor, localisation: Tensor, delta: float) -> tuple[Answer, Tensor]:
    """The answer for the logits, to which the second term gives no gradient, and that term's gradient at the errors."""
    s, _, pos, neg = _split(logits, targets)
    errors = localisation.detach().double()
    gradient, loc_gradient = torch.zeros_like(s), torch.zeros_like(errors)
    classification = boxes = torch.zeros((), dtype=torch.float64)
    for i in pos.tolist():
        above_neg, above_pos, rank = _precisions(s, pos, neg, i, delta)
        classification = classification + above_neg.sum() / rank / len(pos)
        if above_neg.sum() > 1e-5:
            push = ((above_pos * errors).sum() + above_neg.sum()) / rank
            gradient[i] -= push / len(pos)
            gradient[neg] += push * above_neg / above_neg.sum() / len(pos)
        counted = s[pos] >= s[i]
        boxes = boxes + errors[counted].sum() / rank / len(pos)
        loc_gradient[counted] += 1 / rank / len(pos)
    return Answer([classification, boxes], [gradient, torch.zeros_like(s)]), loc_gradient


def dr(logits: Tensor, targets: Tensor) -> Answer:
    """With the defaults of the loss; the derivative is written out."""
    margin, positive_temperature, smoothing, weight = 0.5, 1.0, 6.0, 4.0
    negative_temperature = 0.1 / math.log(3.5)
    s, _, pos, neg = _split(logits, targets)
    gradient = torch.zeros_like(s)
    if len(neg) == 0:
        return Answer([s.new_zeros(())], [gradient])
    p = 1 / (1 + torch.exp(-s))
    weights = torch.exp(p[neg] / negative_temperature)
    weights = weights / weights.sum()
    highest = (weights * p[neg]).sum()
    gradient[neg] = weights * (1 + (p[neg] - highest) / negative_temperature)
    lowest = s.new_ones(())
    if len(pos) > 0:
        weights = torch.exp(-p[pos] / positive_temperature)
        weights = weights / weights.sum()
        lowest = (weights * p[pos]).sum()
        gradient[pos] = -weights * (1 - (p[pos] - lowest) / positive_temperature)
    difference = smoothing * (highest - lowest + margin)
    gradient *= p * (1 - p) * weight / (1 + torch.exp(-difference))
    return Answer([weight * torch.log(1 + torch.exp(difference)) / smoothing], [gradient])


def bucketed_rank_sort(logits: Tensor, targets: Tensor, delta: float) -> Answer:
    """Prototypes: the mean of each run of relevant negatives between two positives in the sorted list."""
    s, _, pos, neg = _split(logits, targets)
    lowest = s[pos].min()
    members: dict[int, list[int]] = {}
    for j in neg.tolist():
        if s[j] >= lowest - delta:
            members.setdefault(int((s[pos] > s[j]).sum()), []).append(j)
    prototypes = {b: s[js].mean() for b, js in members.items()}
    gradient, value = torch.zeros_like(s), torch.zeros((), dtype=torch.float64)
    for i in pos.tolist():
        weights = {b: step(prototypes[b] - s[i], delta) * len(js) for b, js in members.items()}
        false_positives = sum(weights.values(), torch.zeros((), dtype=torch.float64))
        error = false_positives / (step(s[pos] - s[i], delta).sum() + false_positives)
        value = value + error / len(pos)
        gradient[i] -= error / len(pos)
        for b, js in members.items():
            if false_positives > 0:
                gradient[js] += error * weights[b] / false_positives / len(js) / len(pos)
    plain = rank_sort(logits, targets, delta)
    return Answer([value, plain.values[1]], [gradient, plain.gradients[1]])
