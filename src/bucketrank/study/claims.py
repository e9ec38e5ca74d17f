"""The claims of the paper and of this project, each with the measured answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bucketrank.study.study_results import RowResult, SeedMean, StudyOutcome

SAME_GRADIENT = 1e-4  # largest difference, relative to the largest entry, that float32 explains in a whole detector
AS_LONG = 1.05  # largest ratio to the time of the score-based loss


@dataclass(frozen=True)
class Claim:
    """A claim about a detector, the measured numbers, and whether the claim holds; None if they are inconclusive."""

    claim: str
    detector: str
    measured: str
    holds: bool | None


def claims(outcome: StudyOutcome) -> list[Claim]:
    """Return every claim for which the results have numbers."""
    answers = []
    for detector in outcome.detectors:
        results = outcome.of(detector)
        rows = {(result.row.loss, result.row.method): result for result in results if result.row.like is None}
        pairwise = rows.get(("rs", "pairwise"))
        for loss in ("rs", "ap"):
            if (loss, "exact") in rows and (loss, "pairwise") in rows:
                answers += _exact_is_pairwise(outcome, rows[loss, "exact"], rows[loss, "pairwise"])
        ranking = rows.get(("rs", "exact")) or rows.get(("rs", "bucketed"))
        scored = next((result for result in rows.values() if result.scored), None)
        if ranking and scored:
            answers += [*_more_accurate(ranking, scored), *_as_fast(ranking)]
        if pairwise:
            answers += [claim for result in results for claim in _longer_is_better(result, pairwise)]
    return answers


def _exact_is_pairwise(outcome: StudyOutcome, exact: RowResult, pairwise: RowResult) -> list[Claim]:
    detector, loss = exact.row.detector, exact.row.loss
    answers = []
    difference = outcome.measured[detector].gradients.get(loss) if detector in outcome.measured else None
    if difference is not None:
        claim = f"{loss.upper()}: the gradients of exact equal those of pairwise"
        measured = f"largest difference {difference:.1e} of the largest entry, in the first step"
        answers.append(Claim(claim, detector, measured, difference < SAME_GRADIENT))
    exact_ap, pairwise_ap = exact.mean(), pairwise.mean()
    if exact_ap and pairwise_ap:
        claim = f"{loss.upper()}: exact and pairwise end with the same AP, within seed noise"
        gain, noise = exact_ap.mean - pairwise_ap.mean, _noise(exact_ap, pairwise_ap)
        measured = f"{exact_ap.mean:.1f} and {pairwise_ap.mean:.1f} AP: {gain:+.1f}"
        if math.isnan(noise):
            answers.append(Claim(claim, detector, f"{measured}; a single seed has no deviation", None))
        else:
            measured += f"; the seeds' deviation is {noise:.1f}"
            answers.append(Claim(claim, detector, measured, abs(gain) <= 2 * noise))
    return answers


def _noise(one: SeedMean, other: SeedMean) -> float:
    """Return the standard deviation of the difference of two means."""
    return math.sqrt(one.deviation**2 / len(one.values) + other.deviation**2 / len(other.values))


def _more_accurate(ranking: RowResult, scored: RowResult) -> list[Claim]:
    ranking_ap, scored_ap = ranking.mean(), scored.mean()
    if not (ranking_ap and scored_ap):
        return []
    theirs = {run.seed: run.metric() for run in scored.runs}
    pairs = [(run.metric(), theirs[run.seed]) for run in ranking.runs if run.seed in theirs]
    wins = sum(ranked > by_score for ranked, by_score in pairs)
    measured = f"{ranking_ap.mean:.1f} against {scored_ap.mean:.1f} AP ({scored.row.title})"
    measured += f"; ahead with {wins} of {len(pairs)} seeds"
    holds = wins == len(pairs) if len(pairs) > 1 else None  # one seed may be chance
    claim = "the ranking loss ends with more AP than the score-based one"
    return [Claim(claim, ranking.row.detector, measured, holds)]


def _as_fast(ranking: RowResult) -> list[Claim]:
    ratio = ranking.to_scored
    if ratio is None:
        return []
    claim = f"training takes as long as with the score-based loss (at most {AS_LONG:g} times)"
    measured = f"{ratio.median:.2f} times its time per step (quartiles {ratio.low:.2f} to {ratio.high:.2f})"
    return [Claim(claim, ranking.row.detector, measured, ratio.median <= AS_LONG)]


def _longer_is_better(result: RowResult, pairwise: RowResult) -> list[Claim]:
    longer_ap, pairwise_ap = result.mean(), pairwise.mean()
    if result.row.like is None or not (longer_ap and pairwise_ap):
        return []
    claim = f"{result.row.title}: more epochs in the time saved give more AP"
    measured = f"{longer_ap.mean:.1f} AP after {result.epochs} epochs"
    measured += f", {pairwise_ap.mean:.1f} after {pairwise.epochs} by pairwise"
    holds = longer_ap.mean > pairwise_ap.mean if result.epochs != pairwise.epochs else None
    return [Claim(claim, result.row.detector, measured, holds)]
