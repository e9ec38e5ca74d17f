"""Interleaving with a clock of our own; nothing here takes or asserts a time."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from bucketrank.bench.timing import Spread, TimedCall, interleave, ratio


class Clock:
    """Time passes only inside the contenders."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def contender(self, name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(name)
            self.now += seconds

        return call


def test_contenders_take_turns_and_every_second_round_runs_backwards() -> None:
    clock = Clock()
    contenders = {name: TimedCall(clock.contender(name, 1.0), warmup=0) for name in "abc"}
    samples = interleave(contenders, rounds=3, clock=clock)
    assert "".join(clock.calls) == "abc" + "cba" + "abc"
    assert samples == {name: {0: 1.0, 1: 1.0, 2: 1.0} for name in "abc"}


def test_rotation_gives_every_contender_the_first_place() -> None:
    clock = Clock()
    contenders = {name: TimedCall(clock.contender(name, 1.0), warmup=0) for name in "abc"}
    interleave(contenders, rounds=6, rotate=True, clock=clock)
    # Round 1 is bca, backwards.
    assert "".join(clock.calls) == "abc" + "acb" + "cab" + "cba" + "bca" + "bac"


def test_warmup_does_not_count() -> None:
    clock = Clock()
    contenders = {
        "a": TimedCall(clock.contender("a", 2.0), warmup=3),
        "b": TimedCall(clock.contender("b", 1.0), warmup=0),
    }
    samples = interleave(contenders, rounds=1, clock=clock)
    assert "".join(clock.calls) == "aaa" + "ab"
    assert samples == {"a": {0: 2.0}, "b": {0: 1.0}}


def test_untimed_calls_come_right_before_the_timed_one() -> None:
    clock = Clock()
    contenders = {
        "a": TimedCall(clock.contender("a", 1.0), warmup=0, untimed=2),
        "b": TimedCall(clock.contender("b", 1.0), warmup=0),
    }
    samples = interleave(contenders, rounds=2, clock=clock)
    assert "".join(clock.calls) == "aaab" + "baaa"
    assert samples["a"] == {0: 1.0, 1: 1.0}


def test_a_slow_contender_comes_in_fewer_rounds_that_the_others_share() -> None:
    clock = Clock()
    contenders = {
        "quick": TimedCall(clock.contender("quick", 1.0), warmup=0),
        "slow": TimedCall(clock.contender("slow", 9.0), every=4, warmup=0),
        "medium": TimedCall(clock.contender("medium", 3.0), every=2, warmup=0),
    }
    samples = interleave(contenders, rounds=10, clock=clock)
    assert list(samples["slow"]) == [0, 4, 8]
    assert list(samples["medium"]) == [0, 2, 4, 6, 8]
    assert ratio(samples["slow"], samples["quick"]) == Spread(9.0, 9.0, 9.0)
    assert ratio(samples["slow"], samples["medium"]) == Spread(3.0, 3.0, 3.0)


def test_the_device_is_awaited_before_the_clock_is_read() -> None:
    clock = Clock()

    def synchronize() -> None:
        clock.now += 10.0

    contenders = {"a": TimedCall(clock.contender("a", 1.0), warmup=0)}
    samples = interleave(contenders, rounds=1, clock=clock, synchronize=synchronize)
    assert samples == {"a": {0: 11.0}}


def test_ratio_is_of_calls_in_the_same_round() -> None:
    # The machine is ten times slower in round 1: the ratio of each round is 2, that of unpaired calls would not be.
    often, seldom = {0: 2.0, 1: 20.0, 2: 2.0, 3: 7.0}, {0: 1.0, 1: 10.0, 2: 1.0}
    assert ratio(often, seldom) == Spread(2.0, 2.0, 2.0)
    assert ratio(seldom, often) == Spread(0.5, 0.5, 0.5)


def test_progress_hears_of_every_call() -> None:
    clock, heard = Clock(), list[str]()
    contenders = {
        "a": TimedCall(clock.contender("a", 1.0), untimed=1),
        "b": TimedCall(clock.contender("b", 1.0), every=2),
    }
    interleave(contenders, rounds=2, clock=clock, advance=lambda name, calls: heard.extend(name * calls))
    assert heard == clock.calls


def test_a_failure_comes_through_and_leaves_the_collector_on() -> None:
    def fail() -> None:
        assert not gc.isenabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleave({"a": TimedCall(fail, warmup=0)}, rounds=1)
    assert gc.isenabled()


def test_spread_needs_values() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.5, high=2.5)
    with pytest.raises(ValueError, match="got 1"):
        Spread.of([1.0])
