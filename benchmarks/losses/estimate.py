"""Time estimates from small parts of a step, to skip slow contenders."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.losses.contenders import DELTAS, QUADRATIC, Mode, SyntheticLogits, count_operations, loss_step
from benchmarks.timing import DeviceClock, seconds_of

# Operations of the first part: less than a tenth of a second on a current processor.
FIRST_OPERATIONS = 200_000_000
MIN_POSITIVES = 16

ESTIMATE_RULE = (
    "timed with a part of the positives (the others ignored, all negatives kept) and with a smaller part, in the same"
    " rounds as the other contenders; extrapolated by the formula for the operations"
)


class StepPart(NamedTuple):
    """A step with some of the positives, its operations, and its seconds."""

    positives: int
    operations: int
    seconds: float


class StepEstimate(NamedTuple):
    """Seconds of a step and the two parts they were extrapolated from, the smaller first; no parts if it ran whole."""

    seconds: float
    parts: tuple[StepPart, ...] = ()


def estimate_step(
    name: str, loss: str | None, data: SyntheticLogits, *, apart: float, clock: DeviceClock, mode: Mode = "eager"
) -> StepEstimate:
    """Estimate how many seconds a step of the contender ``name`` takes.

    A step whose time is linear in the logits runs in full; so does a compiled or captured one, because its eager form
    was not too slow. A quadratic one is extrapolated from two parts whose times differ by at least ``apart`` seconds: a
    larger ``apart`` gives a better estimate and takes longer.
    """
    if loss is None or name not in QUADRATIC or mode != "eager":
        run = loss_step(name, loss, data, mode=mode)
        run()
        return StepEstimate(_quickest(run, apart, clock))
    whole = data.counts(DELTAS[loss])

    def expected_operations(positives: int) -> int:
        return count_operations(
            name, loss, whole._replace(positives=positives, buckets=min(positives + 1, whole.relevant))
        )

    def part(positives: int) -> StepPart:
        thin = data.thinned(positives)
        seconds = _quickest(loss_step(name, loss, thin), apart, clock)
        return StepPart(positives, count_operations(name, loss, thin.counts(DELTAS[loss])), seconds)

    # The first call may compile or load something.
    loss_step(name, loss, data.thinned(1))()
    kept = MIN_POSITIVES
    while kept < whole.positives and expected_operations(2 * kept) - expected_operations(1) < FIRST_OPERATIONS:
        kept *= 2
    if kept >= whole.positives:
        return StepEstimate(part(whole.positives).seconds)
    small, large = part(kept // 4), part(kept)
    while large.positives < whole.positives and large.seconds - small.seconds < apart:
        small, large = large, part(min(4 * large.positives, whole.positives))
    if large.positives == whole.positives:
        return StepEstimate(large.seconds)
    return StepEstimate(extrapolate(small, large, count_operations(name, loss, whole)), (small, large))


def extrapolate(small: StepPart, large: StepPart, cost: int) -> float:
    """Extrapolate linearly from two parts to the seconds for ``cost`` operations.

    The slope is bounded against noise: time grows, at most in proportion to the operations.

    >>> extrapolate(StepPart(1, 10, 1.5), StepPart(2, 20, 2.0), 100)  # 1 s, plus 0.05 s per operation
    6.0
    """
    proportion = large.seconds / large.operations
    slope = (large.seconds - small.seconds) / (large.operations - small.operations)
    return large.seconds + (min(slope, proportion) if slope > 0 else proportion) * (cost - large.operations)


def _quickest(call: Callable[[], object], apart: float, clock: DeviceClock) -> float:
    """Time up to four calls and return the minimum; long calls suffer less from a cold start and run less often."""
    seconds: list[float] = []
    while len(seconds) < 4 and sum(seconds) < 4 * apart:
        seconds.append(seconds_of(call, clock))
    return min(seconds)
