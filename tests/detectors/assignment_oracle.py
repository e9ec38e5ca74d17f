"""Reference assigners, written from the papers in plain Python: boxes are tuples, IoUs exact fractions.

They share no code with the package. If rounding could decide the result they raise ``TooCloseError``.
"""

from __future__ import annotations

import math
from fractions import Fraction

NEGATIVE, IGNORED = -1, -2

Box = tuple[float, ...]


class TooCloseError(Exception):
    """Rounding could decide the result, so the case proves nothing."""


def iou(box: Box, other: Box) -> Fraction:
    (a, b, c, d), (e, f, g, h) = (tuple(map(Fraction, corners)) for corners in (box, other))
    width, height = min(c, g) - max(a, e), min(d, h) - max(b, f)
    shared = width * height if width > 0 and height > 0 else Fraction(0)
    union = (c - a) * (d - b) + (g - e) * (h - f) - shared
    return shared / union if union else Fraction(0)


def max_iou(
    candidates: list[Box],
    objects: list[Box],
    positive: float,
    negative: float,
    low_quality: float | None,
    valid: list[bool],
) -> list[int]:
    result = [NEGATIVE if ok else IGNORED for ok in valid]
    if not objects:
        return result
    for index, box in enumerate(candidates):
        if valid[index]:
            overlaps = [iou(box, other) for other in objects]
            best = max(overlaps)
            if best >= positive:
                result[index] = overlaps.index(best)
            elif best >= negative:
                result[index] = IGNORED
    if low_quality is not None:
        for number, other in enumerate(objects):
            overlaps = [iou(box, other) if ok else Fraction(-1) for box, ok in zip(candidates, valid, strict=True)]
            best = max(overlaps, default=Fraction(-1))
            if best >= low_quality and best > 0:
                for index, overlap in enumerate(overlaps):
                    if overlap == best:
                        result[index] = number
    return result


def levels(per_level: list[int]) -> list[range]:
    starts = [sum(per_level[:level]) for level in range(len(per_level))]
    return [range(start, start + count) for start, count in zip(starts, per_level, strict=True)]


def atss(anchors: list[Box], objects: list[Box], per_level: list[int], topk: int, valid: list[bool]) -> list[int]:
    middle = [(Fraction(a + c) / 2, Fraction(b + d) / 2) for a, b, c, d in anchors]
    claims: dict[int, list[tuple[Fraction, int]]] = {}
    for number, (a, b, c, d) in enumerate(objects):
        at = Fraction(a + c) / 2, Fraction(b + d) / 2
        nearest = []
        for level in levels(per_level):
            there = [
                ((middle[index][0] - at[0]) ** 2 + (middle[index][1] - at[1]) ** 2, index)
                for index in level
                if valid[index]
            ]
            nearest += [index for _, index in sorted(there)[:topk]]
        overlaps = {index: iou(anchors[index], (a, b, c, d)) for index in nearest}
        if not overlaps:
            continue
        mean = sum(overlaps.values(), Fraction(0)) / len(overlaps)
        variance = sum(((x - mean) ** 2 for x in overlaps.values()), Fraction(0)) / max(len(overlaps) - 1, 1)
        for index, overlap in overlaps.items():
            gap = float(overlap - mean) - math.sqrt(variance)
            if len(set(overlaps.values())) > 1 and abs(gap) < 1e-6:
                raise TooCloseError
            reaches = overlap >= mean and (overlap - mean) ** 2 >= variance
            x, y = middle[index]
            if reaches and min(x - Fraction(a), y - Fraction(b), Fraction(c) - x, Fraction(d) - y) > Fraction(1, 100):
                claims.setdefault(index, []).append((overlap, -number))
    result = [NEGATIVE if ok else IGNORED for ok in valid]
    for index, claimed in claims.items():
        result[index] = -max(claimed)[1]
    return result


def log_density(x: float, weight: float, mean: float, variance: float) -> float:
    if weight == 0:
        return -math.inf
    return math.log(weight) - 0.5 * (math.log(2 * math.pi) + math.log(variance) + (x - mean) ** 2 / variance)


def log_sum(a: float, b: float) -> float:
    top = max(a, b)
    return top + math.log(math.exp(a - top) + math.exp(b - top))


def mixture(samples: list[float]) -> list[tuple[float, float, float]]:
    """Return (weight, mean, variance) of the two components."""
    components = [(0.5, min(samples), 1.0), (0.5, max(samples), 1.0)]
    before = -math.inf
    for _ in range(100):
        logs = [[log_density(x, *component) for component in components] for x in samples]
        totals = [log_sum(*pair) for pair in logs]
        mean_log = math.fsum(totals) / len(samples)
        fitted = []
        for number in (0, 1):
            shares = [math.exp(pair[number] - total) for pair, total in zip(logs, totals, strict=True)]
            mass = math.fsum(shares) + 10 * 2.0**-52
            mean = math.fsum(share * x for share, x in zip(shares, samples, strict=True)) / mass
            spread = math.fsum(share * (x - mean) ** 2 for share, x in zip(shares, samples, strict=True)) / mass
            fitted.append((mass, mean, spread + 1e-5))
        both = fitted[0][0] + fitted[1][0]
        components = [(mass / both, mean, variance) for mass, mean, variance in fitted]
        change, before = abs(mean_log - before), mean_log
        if abs(change - 1e-3) < 1e-10:
            raise TooCloseError
        if change < 1e-3:
            break
    return components


def paa(candidates: list[int], losses: list[float], per_level: list[int], topk: int) -> list[int]:
    result = [min(owner, NEGATIVE) for owner in candidates]
    for number in sorted({owner for owner in candidates if owner >= 0}):
        seen: list[int] = []
        for level in levels(per_level):
            there = [index for index in level if candidates[index] == number]
            seen += sorted(there, key=lambda index: (losses[index], index))[:topk]
        if len(seen) < 2:
            continue
        seen.sort(key=lambda index: (losses[index], index))
        first, second = mixture([losses[index] for index in seen])
        members = []
        for index in seen:
            low, high = log_density(losses[index], *first), log_density(losses[index], *second)
            if low != high and abs(low - high) < 1e-7:
                raise TooCloseError
            if low >= high:
                members.append((index, log_sum(low, high)))
        if not members:
            continue
        highest = max(density for _, density in members)
        if any(1e-10 < highest - density < 1e-8 for _, density in members):
            raise TooCloseError
        for index, density in members:
            result[index] = number
            if density >= highest - 1e-9:
                break
    return result
