"""Interleaved timing of alternatives: a disturbance then slows all of them, so their ratios stay meaningful."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bucketrank.bench.device_clock import DeviceClock, WallClock, seconds_of

WALL_CLOCK = WallClock()


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Spread:
    """The median, the first quartile ``low`` and the third quartile ``high``."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least two values.

        >>> Spread.of([1.0, 2.0, 3.0, 4.0, 100.0])
        Spread(median=3.0, low=2.0, high=4.0)
        """
        if len(values) < 2:
            raise ValueError(f"Spread.of: expected at least 2 values, got {len(values)}")
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class TimedCall:
    """One alternative: the function to ``call``, timed in every ``every``-th round.

    If each ``every`` is a power of two, the faster alternatives take part in every round of a slower one. ``warmup``
    calls run before the first round. ``untimed`` calls run right before each timed one, so that the caches hold the
    data of this alternative and not of the previous one.
    """

    call: Callable[[], object]
    every: int = 1
    warmup: int = 1
    untimed: int = 0


# Seconds by round, without the rounds in which the alternative did not run.
Samples = dict[int, float]


def interleave(
    timed: Mapping[str, TimedCall],
    *,
    rounds: int,
    rotate: bool = False,
    clock: DeviceClock = WALL_CLOCK,
    advance: Callable[[str, int], None] = _nothing,
) -> dict[str, Samples]:
    """Call the alternatives in turn, round after round, and return the seconds of each timed call.

    Every second round runs in reverse, so that no alternative always follows the same one. With ``rotate`` each pair of
    rounds also starts one alternative later: over twice as many rounds as alternatives, each is first twice.
    ``advance`` receives the name of the alternative that was called, and the number of calls.
    """
    for name, alternative in timed.items():
        for _ in range(alternative.warmup):
            alternative.call()
            advance(name, 1)
    clock.synchronize()
    samples: dict[str, Samples] = {name: {} for name in timed}
    collecting = gc.isenabled()
    gc.collect()
    # A garbage collection would count as time of the call during which it happens.
    gc.disable()
    try:
        for turn in range(rounds):
            order = [name for name, alternative in timed.items() if turn % alternative.every == 0]
            if rotate and order:
                first = turn // 2 % len(order)
                order = order[first:] + order[:first]
            for name in reversed(order) if turn % 2 else order:
                for _ in range(timed[name].untimed):
                    timed[name].call()
                samples[name][turn] = seconds_of(timed[name].call, clock)
                advance(name, timed[name].untimed + 1)
    finally:
        if collecting:
            gc.enable()
    return samples


def ratio(numerator: Samples, denominator: Samples) -> Spread:
    """Return the spread of the ratios within a round, over the rounds in which both alternatives ran."""
    both = numerator.keys() & denominator.keys()
    return Spread.of([numerator[turn] / denominator[turn] for turn in sorted(both)])
