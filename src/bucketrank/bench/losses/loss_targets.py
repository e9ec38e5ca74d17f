"""The performance targets of the losses; missed ones are published like the others."""

from __future__ import annotations

from collections.abc import Iterator

from bucketrank.bench.flags import device_type
from bucketrank.bench.losses.loss_contenders import EXACT, LOSSES
from bucketrank.bench.losses.loss_results import PART, LargeResult, LossBench, LossResult
from bucketrank.bench.performance_target import PerformanceTarget, performance_target
from bucketrank.bench.timing import Spread, ratio
from bucketrank.bench.units import size_in_words

# Largest ratio exact / focal by loss and number of logits, then by percentage of positives; None for all others.
TO_FOCAL: dict[tuple[str, int], dict[float | None, float]] = {
    ("ap", 10_000): {None: 1.0},
    ("ap", 100_000): {None: 1.5, 5.0: 2.0},
    ("ap", 1_000_000): {0.1: 1.0, 1.0: 1.3, 5.0: 2.0},
    ("rs", 10_000): {None: 2.0},
    ("rs", 100_000): {None: 2.0, 5.0: 4.0},
    ("rs", 1_000_000): {0.1: 1.3, 1.0: 2.0, 5.0: 5.0},
}
# Smallest ratio pairwise / exact at one million logits, by percentage of positives.
TO_PAIRWISE = {0.1: 50.0, 1.0: 300.0, 5.0: 1000.0}
# Largest peak extra memory of a large batch, in multiples of the memory of the logits.
MEMORY = 6.0
# Largest growth of the time from 1 / PART of a large batch to the whole.
GROWTH = 24.0


def loss_targets(bench: LossBench) -> list[PerformanceTarget]:
    """Return every target for which ``bench`` has numbers; the limits are set for the CPU, so none for other devices.

    ``exact`` is the backend that a user gets by default: the fused kernel if it ran, otherwise torch operations.
    """
    if device_type(bench.settings.device) != "cpu":
        return []
    return [*_to_focal(bench), *_to_pairwise(bench), *_large(bench.large)]


def _exact(bench: LossBench, loss: str, size: int, percent: float) -> LossResult | None:
    for name in EXACT:
        result = bench.find(name, loss, size, percent)
        if result is not None and result.samples:
            return result
    return None


def _cells(bench: LossBench) -> Iterator[tuple[str, int, float, str]]:
    for loss in LOSSES:
        for size in bench.settings.sizes:
            for percent in bench.settings.percent:
                yield loss, size, percent, f"L = {size_in_words(size)}, {percent:g} %"


def _to_focal(bench: LossBench) -> Iterator[PerformanceTarget]:
    for loss, size, percent, where in _cells(bench):
        limits = TO_FOCAL.get((loss, size), {})
        limit = limits.get(percent, limits.get(None))
        exact = _exact(bench, loss, size, percent)
        if limit is not None and exact is not None and exact.to_focal is not None:
            what, disturbed = f"{LOSSES[loss]} {exact.contender} / focal", bench.disturbed(size, percent)
            yield performance_target(what, where, exact.to_focal, limit, at_most=True, disturbed=disturbed)


def speedup(bench: LossBench, loss: str, size: int, percent: float) -> tuple[Spread, bool] | None:
    """Return the ratio pairwise / exact, and whether the time of pairwise is an estimate.

    The estimate extrapolates parts of the pairwise step that were timed in the same rounds.
    """
    exact = _exact(bench, loss, size, percent)
    pairwise = bench.find("pairwise", loss, size, percent)
    if exact is None or pairwise is None:
        return None
    samples = pairwise.samples or pairwise.estimated_samples
    return (ratio(samples, exact.samples), not pairwise.samples) if samples else None


def _to_pairwise(bench: LossBench) -> Iterator[PerformanceTarget]:
    for loss, size, percent, where in _cells(bench):
        faster = speedup(bench, loss, size, percent)
        exact = _exact(bench, loss, size, percent)
        if size == 1_000_000 and percent in TO_PAIRWISE and faster and exact:
            what = f"{LOSSES[loss]} pairwise / {exact.contender}"
            flags = {"at_most": False, "estimated": faster[1], "disturbed": bench.disturbed(size, percent)}
            yield performance_target(what, where, faster[0], TO_PAIRWISE[percent], **flags)


def _large(results: list[LargeResult]) -> Iterator[PerformanceTarget]:
    for result in results:
        title = f"{LOSSES[result.loss]} {result.contender}"
        where = f"L = {size_in_words(result.size)}, {result.positives:,} positives"
        ratio_of_memory = result.extra_bytes / result.logit_bytes
        memory = Spread(ratio_of_memory, ratio_of_memory, ratio_of_memory)
        yield performance_target(f"{title}: peak extra memory / logits", where, memory, MEMORY, at_most=True)
        part = f"{title}: time / time at L = {size_in_words(result.size // PART)}"
        share = f"{100 * result.positives / result.size:g} %"
        yield performance_target(
            f"{part}, same share of positives ({share})", where, result.growth, GROWTH, at_most=True
        )
        yield performance_target(
            f"{part}, same number of positives", where, result.growth_in_logits, GROWTH, at_most=True
        )
