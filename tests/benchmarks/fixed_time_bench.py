"""Results of the benchmark of the losses that were not measured: every contender has a fixed time."""

from __future__ import annotations

from benchmarks.losses.contenders import LOSSES, count_operations
from benchmarks.losses.flops import Counts
from benchmarks.losses.measure import contenders_of
from benchmarks.losses.results import LargeResult, LossBench, LossBenchSettings, LossResult
from benchmarks.timing import Samples, Spread, ratio
from bucketrank.provenance import describe

# Seconds at any size and percentage; pairwise is too slow to be run above 10K.
SECONDS = {
    "focal": 0.010,
    "bce": 0.005,
    "sort": 0.050,
    "pairwise": 4.0,
    "bucketed": 0.2,
    "exact-torch": 0.03,
    "exact-fused": 0.012,
}


def fixed_time_bench(
    *,
    sizes: tuple[int, ...] = (10_000, 1_000_000),
    percent: tuple[float, ...] = (1.0, 5.0),
    fused: bool = True,
    large: bool = True,
) -> LossBench:
    """Return results for these percentages of positives; without ``fused`` as if numba were missing."""
    settings = LossBenchSettings(sizes=sizes, percent=percent, repeats=3)
    results = []
    for size in sizes:
        for share in settings.percent:
            positives = round(size * share / 100)
            counts = Counts(positives, size - positives, size - positives, positives)
            for name, loss, _ in contenders_of(settings):
                result = LossResult(name, loss, size, share, positives, count_operations(name, loss, counts))
                results.append(_timed(result, fused=fused))
    names = [name for name in ("exact-torch", "exact-fused") if fused or name != "exact-fused"]
    large_results = [
        LargeResult(
            name,
            loss,
            size=20_000_000,
            positives=100_000,
            seconds=Spread(0.3, 0.2, 0.4),
            growth=Spread(25.0, 20.0, 30.0),
            growth_in_logits=Spread(15.0, 14.0, 16.0),
            focal_growth=Spread(60.0, 50.0, 70.0),
            to_focal=Spread(0.25, 0.2, 0.3),
            extra_bytes=400_000_000,
            logit_bytes=80_000_000,
        )
        for loss in LOSSES
        for name in names
    ]
    return LossBench(describe(), settings, results, large_results if large else [])


def _timed(result: LossResult, *, fused: bool) -> LossResult:
    def samples(name: str) -> Samples:
        return {0: SECONDS[name], 1: 2 * SECONDS[name], 2: SECONDS[name]}

    fields: dict[str, object] = {**vars(result)}
    if result.contender == "exact-fused" and not fused:
        fields |= {"skipped": "numba is not installed"}
    elif result.contender == "pairwise" and result.size > 10_000:
        estimates = {0: 40.0, 1: 80.0}
        fields |= {"skipped": "too long", "estimated_seconds": 40.0, "estimated_samples": estimates}
    else:
        taken = samples(result.contender)
        fields |= {
            "samples": taken,
            "seconds": Spread.of(list(taken.values())),
            "to_focal": ratio(taken, samples("focal")),
            "estimated_seconds": SECONDS[result.contender],
            "extra_bytes": 12 * result.size,
            "value": 0.9,
        }
    return LossResult(**fields)  # type: ignore[arg-type]
