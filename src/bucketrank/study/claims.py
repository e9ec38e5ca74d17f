"""The paper's claims and ours, each with the measured answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bucketrank.study.results import Mean, Outcome, Result

AGREE = 1e-4  # of the largest entry: gradients of a whole detector in float32 that differ by less are the same
AS_LONG = 1.05  # of the score-based loss's time


@dataclass(frozen=True)
class Claim:
    """What is claimed of a detector, what was measured, and whether it holds; None if that cannot be told."""

    claim: str
    detector: str
    measured: str
    holds: bool | None


def claims(outcome: Outcome) -> list[Claim]:
    """All that the results have something to say about."""
    found = []
    for detector in outcome.detectors:
        rows = {(each.row.loss, each.row.method): each for each in outcome.of(detector) if each.row.like is None}
        for loss in ("rs", "ap"):
            exact, pairs = rows.get((loss, "exact")), rows.get((loss, "pairwise"))
            if exact and pairs:
                found += _same_training(outcome, exact, pairs)
        best = rows.get(("rs", "exact")) or rows.get(("rs", "bucketed"))
        other = next((each for each in rows.values() if each.scored), None)
        if best and other:
            found += [*_beats(best, other), *_as_fast(best)]
        found += [claim for each in outcome.of(detector) for claim in _longer(each, rows.get(("rs", "pairwise")))]
    return found


def _same_training(outcome: Outcome, exact: Result, pairs: Result) -> list[Claim]:
    detector, loss = exact.row.detector, exact.row.loss
    found = []
    apart = outcome.measured[detector].gradients.get(loss) if detector in outcome.measured else None
    if apart is not None:
        told = f"largest difference {apart:.1e} of the largest entry, in the first step"
        found.append(
            Claim(f"{loss.upper()}: the gradients of exact are those of all pairs", detector, told, apart < AGREE)
        )
    mine, other = exact.mean(), pairs.mean()
    if mine and other:
        difference, noise = mine.mean - other.mean, _noise(mine, other)
        told = f"{mine.mean:.1f} and {other.mean:.1f} AP: {difference:+.1f}"
        if math.isnan(noise):
            told += "; one seed tells nothing about noise"
        else:
            told += f"; the seeds' deviation is {noise:.1f}"
        holds = None if math.isnan(noise) else abs(difference) <= 2 * noise
        found.append(
            Claim(f"{loss.upper()}: exact and pairs end with the same AP, within seed noise", detector, told, holds)
        )
    return found


def _noise(one: Mean, other: Mean) -> float:
    """The deviation of the difference of two means."""
    return math.sqrt(one.deviation**2 / len(one.values) + other.deviation**2 / len(other.values))


def _beats(best: Result, other: Result) -> list[Claim]:
    mine, theirs = best.mean(), other.mean()
    if not (mine and theirs):
        return []
    wins = sum(a > b for a, b in zip(mine.values, theirs.values, strict=False))
    seeds = min(len(mine.values), len(theirs.values))
    told = f"{mine.mean:.1f} against {theirs.mean:.1f} AP ({other.row.title}); ahead with {wins} of {seeds} seeds"
    holds = wins == seeds if seeds > 1 else None  # a single seed may be luck
    return [Claim("the ranking loss ends with more AP than the score-based one", best.row.detector, told, holds)]


def _as_fast(best: Result) -> list[Claim]:
    if best.to_scored is None:
        return []
    spread = best.to_scored
    told = f"{spread.median:.2f} times its time a step (quartiles {spread.low:.2f} to {spread.high:.2f})"
    name = f"training takes as long as with the score-based loss (at most {AS_LONG:g} times)"
    return [Claim(name, best.row.detector, told, spread.median <= AS_LONG)]


def _longer(each: Result, pairs: Result | None) -> list[Claim]:
    if each.row.like is None or pairs is None:
        return []
    mine, theirs = each.mean(), pairs.mean()
    if not (mine and theirs):
        return []
    told = f"{mine.mean:.1f} AP after {each.epochs} epochs, {theirs.mean:.1f} after {pairs.epochs} by all pairs"
    name = f"{each.row.title}: the time saved buys AP"
    return [Claim(name, each.row.detector, told, mine.mean > theirs.mean if each.epochs != pairs.epochs else None)]
