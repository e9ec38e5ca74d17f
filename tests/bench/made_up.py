"""A study that nobody measured: every contender has a time that is easy to compute with."""

from __future__ import annotations

from bucketrank.bench.contenders import LOSSES, operations
from bucketrank.bench.flops import Counts
from bucketrank.bench.machine import describe
from bucketrank.bench.plan import NAMES
from bucketrank.bench.study import LargeResult, Result, Settings, Study
from bucketrank.bench.timing import Samples, Spread, ratio

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


def made_up(*, sizes: tuple[int, ...] = (10_000, 1_000_000), fused: bool = True, large: bool = True) -> Study:
    settings = Settings(sizes=sizes, percent=(1.0, 5.0), repeats=3)
    results = []
    for size in sizes:
        for percent in settings.percent:
            positives = round(size * percent / 100)
            counts = Counts(positives, size - positives, size - positives, positives)
            for name, loss in NAMES:
                result = Result(name, loss, size, percent, positives, operations(name, loss, counts))
                results.append(_timed(result, fused=fused))
    of = [name for name in ("exact-torch", "exact-fused") if fused or name != "exact-fused"]
    many = [
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
        for name in of
    ]
    return Study(describe(), settings, results, many if large else [])


def _timed(result: Result, *, fused: bool) -> Result:
    def samples(name: str) -> Samples:
        return {0: SECONDS[name], 1: 2 * SECONDS[name], 2: SECONDS[name]}

    about: dict[str, object] = {**vars(result)}
    if result.contender == "exact-fused" and not fused:
        about |= {"skipped": "numba is not installed"}
    elif result.contender == "pairwise" and result.size > 10_000:
        estimates = {0: 40.0, 1: 80.0}
        about |= {"skipped": "too long", "estimated_seconds": 40.0, "estimated_samples": estimates}
    else:
        taken = samples(result.contender)
        about |= {
            "samples": taken,
            "seconds": Spread.of(list(taken.values())),
            "to_focal": ratio(taken, samples("focal")),
            "estimated_seconds": SECONDS[result.contender],
            "extra_bytes": 12 * result.size,
            "value": 0.9,
        }
    return Result(**about)  # type: ignore[arg-type]
