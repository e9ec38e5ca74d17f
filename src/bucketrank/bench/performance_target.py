"""A number that a benchmark must reach, and whether it did."""

from __future__ import annotations

from dataclasses import dataclass

from bucketrank.bench.timing import Spread


@dataclass(frozen=True)
class PerformanceTarget:
    """A measured value with its quartiles ``low`` and ``high``, and the limit it must keep.

    ``estimated``: the value rests on an extrapolated time. ``disturbed``: other programs ran during the measurement.
    """

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


def performance_target(what: str, where: str, spread: Spread, limit: float, **flags: bool) -> PerformanceTarget:
    """Return the target for a measured ``spread``; ``flags`` are the boolean fields."""
    return PerformanceTarget(what, where, spread.median, spread.low, spread.high, limit, **flags)
