"""Timing of alternatives, interleaved: what disturbs one of them disturbs the others, and ratios stay meaningful."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Spread:
    """Median, first and third quartile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least two values.

        >>> Spread.of([1.0, 2.0, 3.0, 4.0, 100.0])
        Spread(median=3.0, low=2.0, high=4.0)
        """
        if len(values) < 2:
            raise ValueError(f"Spread.of: expected at least 2 values, got {len(values)}")
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Contender:
    """One alternative: what to call, in every how many-th round, and how many calls before do not count.

    With powers of two in ``every`` a slow contender only meets rounds that a faster one takes part in too. ``warmup``
    calls come before all rounds, ``untimed`` calls right before each timed one: a short step should find the caches
    as it left them itself, not as another contender did.
    """

    call: Callable[[], object]
    every: int = 1
    warmup: int = 1
    untimed: int = 0


# Seconds by round; a round without the contender is missing.
Samples = dict[int, float]


def interleave(
    contenders: Mapping[str, Contender],
    *,
    rounds: int,
    rotate: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], None] = _nothing,
    advance: Callable[[str, int], None] = _nothing,
) -> dict[str, Samples]:
    """Calls the contenders in turn, round after round, and returns the seconds of each call.

    Every second round runs backwards, so no contender always follows the same one; with ``rotate`` the contenders
    also move up, so that over twice as many rounds as there are contenders each is first twice. ``advance`` is told who
    was called, and how often.
    """
    for name, contender in contenders.items():
        for _ in range(contender.warmup):
            contender.call()
            advance(name, 1)
    synchronize()
    samples: dict[str, Samples] = {name: {} for name in contenders}
    collecting = gc.isenabled()
    gc.collect()
    # A collection would be charged to whoever happens to run.
    gc.disable()
    try:
        for turn in range(rounds):
            order = [name for name, contender in contenders.items() if turn % contender.every == 0]
            if rotate and order:
                first = turn % len(order)
                order = order[first:] + order[:first]
            for name in reversed(order) if turn % 2 else order:
                for _ in range(contenders[name].untimed):
                    contenders[name].call()
                synchronize()
                start = clock()
                contenders[name].call()
                synchronize()
                samples[name][turn] = clock() - start
                advance(name, contenders[name].untimed + 1)
    finally:
        if collecting:
            gc.enable()
    return samples


def ratio(numerator: Samples, denominator: Samples) -> Spread:
    """The spread of the ratios of two calls in the same round, over the rounds both took part in."""
    both = numerator.keys() & denominator.keys()
    return Spread.of([numerator[turn] / denominator[turn] for turn in sorted(both)])


def seconds_of(call: Callable[[], object], synchronize: Callable[[], None] = _nothing) -> float:
    """Seconds of a single call."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start
