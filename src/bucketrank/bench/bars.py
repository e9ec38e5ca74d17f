"""The bars the losses have to clear, and whether they do; defeats stand beside victories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bucketrank.bench.contenders import LOSSES
from bucketrank.bench.numbers import size_in_words
from bucketrank.bench.study import PART, LargeResult, Result, Study
from bucketrank.bench.timing import Spread, ratio

# exact / focal at most, by loss and size; by percentage where it matters, None for the others.
TO_FOCAL: dict[tuple[str, int], dict[float | None, float]] = {
    ("ap", 10_000): {None: 1.0},
    ("ap", 100_000): {None: 1.5, 5.0: 2.0},
    ("ap", 1_000_000): {0.1: 1.0, 1.0: 1.3, 5.0: 2.0},
    ("rs", 10_000): {None: 2.0},
    ("rs", 100_000): {None: 2.0, 5.0: 4.0},
    ("rs", 1_000_000): {0.1: 1.3, 1.0: 2.0, 5.0: 5.0},
}
# pairwise / exact at least, at one million logits.
TO_PAIRWISE = {0.1: 50.0, 1.0: 300.0, 5.0: 1000.0}
MEMORY = 6.0
GROWTH = 24.0


@dataclass(frozen=True)
class Bar:
    """One bar: a number, what it has to be, and whether it is."""

    what: str
    where: str
    value: float
    low: float
    high: float
    limit: float
    at_most: bool
    estimated: bool = False
    disturbed: bool = False

    @property
    def passed(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def bars(study: Study) -> list[Bar]:
    """Every bar for which the study has numbers. ``exact`` is the backend a user gets: the fused kernel if it ran."""
    return [*_to_focal(study), *_to_pairwise(study), *_large(study.large)]


def _bar(what: str, where: str, spread: Spread, limit: float, **how: bool) -> Bar:
    return Bar(what, where, spread.median, spread.low, spread.high, limit, **how)


def _exact(study: Study, loss: str, size: int, percent: float) -> Result | None:
    for name in ("exact-fused", "exact-torch"):
        found = study.find(name, loss, size, percent)
        if found is not None and found.samples:
            return found
    return None


def _cells(study: Study) -> Iterator[tuple[str, int, float, str]]:
    for loss in LOSSES:
        for size in study.settings.sizes:
            for percent in study.settings.percent:
                yield loss, size, percent, f"L = {size_in_words(size)}, {percent:g} %"


def _to_focal(study: Study) -> Iterator[Bar]:
    for loss, size, percent, where in _cells(study):
        limits = TO_FOCAL.get((loss, size), {})
        limit = limits.get(percent, limits.get(None))
        exact = _exact(study, loss, size, percent)
        if limit is not None and exact is not None and exact.to_focal is not None:
            what, disturbed = f"{LOSSES[loss]} {exact.contender} / focal", study.disturbed(size, percent)
            yield _bar(what, where, exact.to_focal, limit, at_most=True, disturbed=disturbed)


def speedup(study: Study, loss: str, size: int, percent: float) -> tuple[Spread, bool] | None:
    """pairwise / exact, and whether that rests on an estimate of pairwise, from parts timed in the same rounds."""
    exact = _exact(study, loss, size, percent)
    pairwise = study.find("pairwise", loss, size, percent)
    if exact is None or pairwise is None:
        return None
    taken = pairwise.samples or pairwise.estimated_samples
    return (ratio(taken, exact.samples), not pairwise.samples) if taken else None


def _to_pairwise(study: Study) -> Iterator[Bar]:
    for loss, size, percent, where in _cells(study):
        found = speedup(study, loss, size, percent)
        exact = _exact(study, loss, size, percent)
        if size == 1_000_000 and percent in TO_PAIRWISE and found and exact:
            what = f"{LOSSES[loss]} pairwise / {exact.contender}"
            how = {"at_most": False, "estimated": found[1], "disturbed": study.disturbed(size, percent)}
            yield _bar(what, where, found[0], TO_PAIRWISE[percent], **how)


def _large(results: list[LargeResult]) -> Iterator[Bar]:
    for result in results:
        title = f"{LOSSES[result.loss]} {result.contender}"
        where = f"L = {size_in_words(result.size)}, {result.positives:,} positives"
        memory = result.extra_bytes / result.logit_bytes
        yield _bar(f"{title}: peak extra memory / logits", where, Spread(memory, memory, memory), MEMORY, at_most=True)
        part = f"{title}: time / time at L = {size_in_words(result.size // PART)}"
        share = f"{100 * result.positives / result.size:g} %"
        yield _bar(f"{part}, {share} there, too", where, result.growth, GROWTH, at_most=True)
        yield _bar(f"{part}, as many positives", where, result.growth_in_logits, GROWTH, at_most=True)
