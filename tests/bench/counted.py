"""The algorithms on scalars that count their operations by the rule of ``bucketrank.bench.losses.flops``: its oracle.

Each also returns the loss and the gradient, so that a test can compare it with the real loss.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

TALLY = [0]


class Real:
    """A float whose arithmetic and comparisons are counted."""

    def __init__(self, value: float) -> None:
        self.value = float(value)

    def _do(self, value: float) -> Real:
        TALLY[0] += 1
        return Real(value)

    def __add__(self, other: Real | float) -> Real:
        return self._do(self.value + plain(other))

    def __sub__(self, other: Real | float) -> Real:
        return self._do(self.value - plain(other))

    def __rsub__(self, other: float) -> Real:
        return self._do(other - self.value)

    def __mul__(self, other: Real | float) -> Real:
        return self._do(self.value * plain(other))

    def __truediv__(self, other: Real | float) -> Real:
        return self._do(self.value / plain(other))

    def __rtruediv__(self, other: float) -> Real:
        return self._do(other / self.value)

    def __neg__(self) -> Real:
        return self._do(-self.value)

    def __abs__(self) -> Real:
        return self._do(abs(self.value))

    def __lt__(self, other: Real | float) -> bool:
        TALLY[0] += 1
        return self.value < plain(other)

    def __ge__(self, other: Real | float) -> bool:
        return not self < other


def plain(x: Real | float) -> float:
    return x.value if isinstance(x, Real) else x


def high(x: Real, y: float) -> Real:
    return x._do(max(x.value, y))


def low(x: Real, y: float) -> Real:
    return x._do(min(x.value, y))


def exp(x: Real) -> Real:
    TALLY[0] += 8
    return Real(math.exp(x.value))


def log(x: Real) -> Real:
    TALLY[0] += 8
    return Real(math.log(x.value))


def ordered(values: Sequence[Real]) -> list[int]:
    """Return the positions from the lowest value to the highest; counts n ceil(log2 n)."""
    TALLY[0] += len(values) * math.ceil(math.log2(len(values)))
    return sorted(range(len(values)), key=lambda i: values[i].value)


def count_at_most(values: Sequence[Real], x: Real) -> int:
    """Return how many of the sorted values are at most x; counts ceil(log2(n + 1))."""
    TALLY[0] += math.ceil(math.log2(len(values) + 1))
    return bisect_right([value.value for value in values], x.value)


def total(values: Sequence[Real]) -> Real:
    result = Real(0)
    for value in values:
        result = result + value
    return result


def step(x: Real, y: Real, delta: float) -> Real:
    return low(high((x - y) * (1 / (2 * delta)) + 0.5, 0.0), 1.0)


def relevant(s: Sequence[Real], negatives: Sequence[Real], delta: float) -> list[Real]:
    lowest = s[0]
    for value in s[1:]:
        lowest = value if value < lowest else lowest
    edge = lowest - delta
    return [n for n in negatives if n >= edge]


def ranked(ranks: Sequence[Real], fps: Sequence[Real]) -> tuple[Real, list[Real], list[Real]]:
    """Return the loss, the gradient of the positives, and 1 / rank(i)."""
    loss, weights, gradient = Real(0), [], []
    for rank, fp in zip(ranks, fps, strict=True):
        both = rank + fp
        error = fp / both
        weights.append(1 / both)
        gradient.append(-error)
        loss = loss + error
    p = len(ranks)
    return loss / p, [g / p for g in gradient], weights


def missorted(
    plus: Sequence[Real], current: Sequence[Real], best: Sequence[Real], count: Sequence[Real], worse: Sequence[Real]
) -> tuple[Real, list[Real], list[Real]]:
    """Return the loss, the error e(i) of missorted positives (else 0), and e(i) / D(i)."""
    loss, errors, weights = Real(0), [], []
    for i in range(len(plus)):
        error = current[i] / plus[i] - best[i] / count[i]
        loss = loss + error
        some = not worse[i] < 1e-12
        errors.append(error if some else Real(0))
        weights.append(errors[i] / (worse[i] if some else Real(1)))
    return loss / len(plus), errors, weights


def pairwise(
    s: Sequence[Real], u: Sequence[Real] | None, negatives: Sequence[Real], delta: float
) -> tuple[list[Real], list[Real], list[Real]]:
    """Run the paper's Algorithm 1; return losses, gradients of the positives, gradients of the relevant negatives."""
    near = relevant(s, negatives, delta)
    above = [[step(x, y, delta) for x in s] for y in s]
    over = [[step(x, y, delta) for x in near] for y in s]
    ranks = [total(row) for row in above]
    loss, gradient, weights = ranked(ranks, [total(row) for row in over])
    spread = [Real(0) for _ in near]
    for row, weight in zip(over, weights, strict=True):
        spread = [g + weight * h for g, h in zip(spread, row, strict=True)]
    spread = [g / len(s) for g in spread]
    if u is None:
        return [loss], gradient, spread
    sorting, more = _sorting_by_pairs(above, ranks, u)
    # The two terms keep their gradients apart; adding them here is not counted.
    return [loss, sorting], [Real(a.value + b.value) for a, b in zip(gradient, more, strict=True)], spread


def _sorting_by_pairs(
    above: Sequence[Sequence[Real]], ranks: Sequence[Real], u: Sequence[Real]
) -> tuple[Real, list[Real]]:
    errors = [1 - x for x in u]
    current, best, count, worse, masks = [], [], [], [], []
    for row, own in zip(above, u, strict=True):
        better = [other >= own for other in u]
        products = [e * h for e, h in zip(errors, row, strict=True)]
        current.append(total(products))
        best.append(total([x if yes else Real(0) for x, yes in zip(products, better, strict=True)]))
        count.append(total([x if yes else Real(0) for x, yes in zip(row, better, strict=True)]))
        masks.append([Real(0) if yes else x for x, yes in zip(row, better, strict=True)])
        worse.append(total(masks[-1]))
    loss, promoted, weights = missorted(ranks, current, best, count, worse)
    gradient = [Real(0) for _ in u]
    for row, weight in zip(masks, weights, strict=True):
        gradient = [g + weight * h for g, h in zip(gradient, row, strict=True)]
    return loss, [(g - e) / len(u) for g, e in zip(gradient, promoted, strict=True)]


def bucketed(
    s: Sequence[Real], u: Sequence[Real] | None, negatives: Sequence[Real], delta: float
) -> tuple[list[Real], list[Real], list[Real]]:
    """Run the paper's Algorithm 2; the last gradients are those of the prototypes, which their members share."""
    order = ordered([*s, *negatives])
    near = {id(n) for n in relevant(s, negatives, delta)}
    buckets: list[list[Real]] = [[]]
    for position in order:
        if position < len(s):
            buckets.append([])
        elif id(negatives[position - len(s)]) in near:
            buckets[-1].append(negatives[position - len(s)])
    buckets = [bucket for bucket in buckets if bucket]
    prototypes = [total(bucket) / len(bucket) for bucket in buckets]
    above = [[step(x, y, delta) for x in s] for y in s]
    over = [[step(x, y, delta) for x in prototypes] for y in s]
    ranks = [total(row) for row in above]
    fps = [total([h * len(b) for h, b in zip(row, buckets, strict=True)]) for row in over]
    loss, gradient, weights = ranked(ranks, fps)
    spread = [Real(0) for _ in prototypes]
    for row, weight in zip(over, weights, strict=True):
        spread = [g + weight * h for g, h in zip(spread, row, strict=True)]
    spread = [g / len(s) for g in spread]
    if u is None:
        return [loss], gradient, spread
    sorting, more = _sorting_by_pairs(above, ranks, u)
    return [loss, sorting], [Real(a.value + b.value) for a, b in zip(gradient, more, strict=True)], spread


def walk(points: Sequence[Real], thresholds: Sequence[Real]) -> list[int]:
    """Return how many ascending points lie below each ascending threshold; counts a comparison for each of both."""
    counts: list[int] = []
    passed = 0
    for _ in range(len(points) + len(thresholds)):
        point = points[passed] if passed < len(points) else Real(math.inf)
        threshold = thresholds[len(counts)] if len(counts) < len(thresholds) else Real(math.inf)
        if point < threshold:
            passed += 1
        else:
            counts.append(passed)
    return counts


def _running(values: Sequence[Real]) -> list[Real]:
    sums = [Real(0)]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def exact(
    s: Sequence[Real], u: Sequence[Real] | None, negatives: Sequence[Real], delta: float
) -> tuple[list[Real], list[Real], list[Real]]:
    """Run exact bucketing: sums above both edges of each ramp."""
    near, p = relevant(s, negatives, delta), len(s)
    lower, upper = [x - delta for x in s], [x + delta for x in s]
    both = [*lower, *upper]
    order = ordered(both)
    edges = [both[i] for i in order]
    position = {i: k for k, i in enumerate(order)}  # of edge i among the sorted edges
    counts, sums = [0] * (2 * p + 1), [Real(0) for _ in range(2 * p + 1)]
    at = [count_at_most(edges, x) for x in near]
    for bucket, x in zip(at, near, strict=True):
        counts[bucket] += 1
        sums[bucket] = sums[bucket] + x
    suffix = _running(sums[::-1])[::-1]  # suffix[k]: buckets k and above
    reached = [sum(counts[k:]) for k in range(2 * p + 2)]
    ramp = 1 / (2 * delta)

    def above(i: int, tau: Real) -> Real:
        k = position[i] + 1
        return suffix[k] - tau * reached[k]

    fps = [(above(i, lower[i]) - above(p + i, upper[i])) * ramp for i in range(p)]

    by_score = ordered(s)
    scores = [s[i] for i in by_score]
    below = [walk(scores, [edge[i] for i in by_score]) for edge in (lower, upper)]
    cumulative = _running(scores[::-1])[::-1]
    ranks = [Real(0) for _ in s]
    for k, i in enumerate(by_score):
        first, last = below[0][k], below[1][k]
        difference = (cumulative[first] - lower[i] * (p - first)) - (cumulative[last] - upper[i] * (p - last))
        ranks[i] = difference * ramp
    loss, gradient, weights = ranked(ranks, fps)

    slopes, offsets = [Real(0) for _ in edges], [Real(0) for _ in edges]
    for i, weight in enumerate(weights):
        slope = weight / p * ramp
        k, m = position[i], position[p + i]
        slopes[k], offsets[k] = slopes[k] + slope, offsets[k] - slope * lower[i]
        slopes[m], offsets[m] = slopes[m] - slope, offsets[m] + slope * upper[i]
    slopes, offsets = _running(slopes), _running(offsets)
    spread = [offsets[k] + slopes[k] * x for k, x in zip(at, near, strict=True)]
    if u is None:
        return [loss], gradient, spread

    errors = [1 - x for x in u]
    weighted = _running([errors[i] for i in reversed(by_score)])[::-1]
    moments = _running([errors[i] * s[i] for i in reversed(by_score)])[::-1]
    current = [Real(0) for _ in s]
    for k, i in enumerate(by_score):
        first, last = below[0][k], below[1][k]
        difference = (moments[first] - lower[i] * weighted[first]) - (moments[last] - upper[i] * weighted[last])
        current[i] = difference * ramp
    by_label = ordered(u)[::-1]
    best, count = ([Real(0) for _ in s] for _ in range(2))
    _from_better(by_label, s, lower, upper, errors, best, count)
    best = [x * ramp + e * 0.5 for x, e in zip(best, errors, strict=True)]
    count = [x * ramp + 0.5 for x in count]
    worse = [rank - x for rank, x in zip(ranks, count, strict=True)]
    sorting, promoted, weights = missorted(ranks, current, best, count, worse)
    # H(s_i - s_k) is the same primitive on the reversed axis.
    demoted = [Real(0) for _ in s]
    reverse = [Real(-x.value) for x in s]
    _from_better(
        by_label, reverse, [Real(-x.value) for x in upper], [Real(-x.value) for x in lower], weights, demoted, None
    )
    more = [(Real(0) + x * ramp - e) / p for x, e in zip(demoted, promoted, strict=True)]
    return [loss, sorting], [Real(a.value + b.value) for a, b in zip(gradient, more, strict=True)], spread


def _from_better(
    by_label: list[int],
    s: Sequence[Real],
    lower: Sequence[Real],
    upper: Sequence[Real],
    weights: Sequence[Real],
    sums: list[Real],
    counts: list[Real] | None,
) -> list[int]:
    """Add to each positive the ramps of all with a better label; return the positions in order of score."""
    n = len(by_label)
    if n < 2:
        return by_label
    better = _from_better(by_label[: n - n // 2], s, lower, upper, weights, sums, counts)
    worse = _from_better(by_label[n - n // 2 :], s, lower, upper, weights, sums, counts)
    scores = [s[i] for i in better]
    first = walk(scores, [lower[i] for i in worse])
    last = walk(scores, [upper[i] for i in worse])
    weighted = _running([weights[i] for i in reversed(better)])[::-1]
    moments = _running([weights[i] * s[i] for i in reversed(better)])[::-1]
    plain_moments = _running([s[i] for i in reversed(better)])[::-1] if counts is not None else []
    for i, a, b in zip(worse, first, last, strict=True):
        sums[i] = sums[i] + ((moments[a] - lower[i] * weighted[a]) - (moments[b] - upper[i] * weighted[b]))
        if counts is not None:
            low_ramp = plain_moments[a] - lower[i] * (len(better) - a)
            counts[i] = counts[i] + (low_ramp - (plain_moments[b] - upper[i] * (len(better) - b)))
    TALLY[0] += n  # merging
    return sorted([*better, *worse], key=lambda i: s[i].value)


def sigmoid(x: Real) -> Real:
    return 1 / (exp(-x) + 1)


def cross_entropy(x: Real, t: float) -> Real:
    return high(x, 0.0) - x * t + log(exp(-abs(x)) + 1)


def focal(x: Real, t: float) -> tuple[Real, Real]:
    """Return the focal loss of one logit (alpha 0.25, gamma 2) and its derivative, operation by operation."""
    target = Real(t)
    p = sigmoid(x)
    miss = 1 - (p * target + (1 - p) * (1 - target))
    alpha = target * 0.25 + (1 - target) * 0.75
    square, entropy = miss * miss, cross_entropy(x, t)
    scale = alpha * square
    loss = Real(0) + scale * entropy

    by_scale, by_entropy = Real(1) * entropy, Real(1) * scale
    by_square = by_scale * alpha
    by_p_t = -(by_square * (miss * 2))
    away = Real(1 - t)  # 1 - t, known from the forward pass
    by_p = by_p_t * target + -(by_p_t * away)
    rest = Real(1 - p.value)
    by_logit = by_p * p * rest
    TALLY[0] += 1  # 1 - p, which the backward pass computes again
    return loss, by_logit + (sigmoid(x) - t) * by_entropy
