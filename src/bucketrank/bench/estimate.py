"""How long a step would take, from small parts of it: what takes too long is left out before it is spent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bucketrank.bench.contenders import DELTAS, QUADRATIC, operations, step
from bucketrank.bench.synthetic import Synthetic
from bucketrank.bench.timing import seconds_of

# Operations of the first part: less than a tenth of a second on a processor of today.
FIRST = 200_000_000
FEWEST_POSITIVES = 16

HOW = (
    "timed with a part of the positives (the others ignored, all negatives kept) and with a smaller part, in the same"
    " rounds as the other contenders; continued along the formula for the operations"
)


class Part(NamedTuple):
    """A step with only some of the positives: what it costs, and the seconds it took."""

    positives: int
    operations: int
    seconds: float


class Estimate(NamedTuple):
    """Seconds of a step, and the two parts they were extrapolated from, the smaller first; none if it was run whole."""

    seconds: float
    parts: tuple[Part, ...] = ()


def estimate(
    name: str, loss: str | None, data: Synthetic, *, apart: float, synchronize: Callable[[], None]
) -> Estimate:
    """What is linear in the logits is simply run; of the rest, two parts that differ by at least ``apart`` seconds.

    With more ``apart`` the estimate is better, and takes longer.
    """
    if loss is None or name not in QUADRATIC:
        run = step(name, loss, data)
        run()
        return Estimate(_quickest(run, apart, synchronize))
    whole = data.counts(DELTAS[loss])

    def about(positives: int) -> int:
        return operations(name, loss, whole._replace(positives=positives, buckets=min(positives + 1, whole.relevant)))

    def part(positives: int) -> Part:
        thin = data.thinned(positives)
        seconds = _quickest(step(name, loss, thin), apart, synchronize)
        return Part(positives, operations(name, loss, thin.counts(DELTAS[loss])), seconds)

    # The first call of all may have something to compile or to load.
    step(name, loss, data.thinned(1))()
    kept = FEWEST_POSITIVES
    while kept < whole.positives and about(2 * kept) - about(1) < FIRST:
        kept *= 2
    if kept >= whole.positives:
        return Estimate(part(whole.positives).seconds)
    small, large = part(kept // 4), part(kept)
    while large.positives < whole.positives and large.seconds - small.seconds < apart:
        small, large = large, part(min(4 * large.positives, whole.positives))
    if large.positives == whole.positives:
        return Estimate(large.seconds)
    return Estimate(extrapolate(small, large, operations(name, loss, whole)), (small, large))


def extrapolate(small: Part, large: Part, cost: int) -> float:
    """The straight line through two parts, at ``cost`` operations.

    Noise may tilt the line: the time grows, and at most in proportion to the operations.

    >>> extrapolate(Part(1, 10, 1.5), Part(2, 20, 2.0), 100)  # 1 s, whatever there is to do, and 0.05 s an operation
    6.0
    """
    proportion = large.seconds / large.operations
    slope = (large.seconds - small.seconds) / (large.operations - small.operations)
    return large.seconds + (min(slope, proportion) if slope > 0 else proportion) * (cost - large.operations)


def _quickest(call: Callable[[], object], apart: float, synchronize: Callable[[], None]) -> float:
    """The best of up to four calls; of fewer if they are long, as only short ones suffer from a cold start."""
    seconds: list[float] = []
    while len(seconds) < 4 and sum(seconds) < 4 * apart:
        seconds.append(seconds_of(call, synchronize))
    return min(seconds)
