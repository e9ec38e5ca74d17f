"""Interleaved timing with a simulated clock."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from benchmarks.timing import Spread, TimedCall, WallClock, interleave, ratio


class Clock:
    """A clock whose time passes only inside the calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def pass_time() -> None:
            self.calls.append(name)
            self.now += seconds

        return pass_time


def test_calls_take_turns_and_every_second_round_runs_backwards() -> None:
    clock = Clock()
    calls = {name: TimedCall(clock.call(name, 1.0), warmup=0) for name in "abc"}
    samples = interleave(calls, rounds=3, clock=WallClock(clock))
    assert "".join(clock.calls) == "abc" + "cba" + "abc"
    assert samples == {name: {0: 1.0, 1: 1.0, 2: 1.0} for name in "abc"}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("ab", ["ab", "ba", "ba", "ab"]),
        ("abc", ["abc", "cba", "bca", "acb", "cab", "bac"]),
        ("abcd", ["abcd", "dcba", "bcda", "adcb", "cdab", "badc", "dabc", "cbad"]),
    ],
)
def test_rotation_puts_every_call_first_twice_and_last_twice(names: str, expected: list[str]) -> None:
    clock = Clock()
    calls = {name: TimedCall(clock.call(name, 1.0), warmup=0) for name in names}
    interleave(calls, rounds=2 * len(names), rotate=True, clock=WallClock(clock))
    assert "".join(clock.calls) == "".join(expected)
    for position in (0, -1):
        assert sorted(each[position] for each in expected) == sorted(2 * names)


def test_warmup_does_not_count() -> None:
    clock = Clock()
    calls = {
        "a": TimedCall(clock.call("a", 2.0), warmup=3),
        "b": TimedCall(clock.call("b", 1.0), warmup=0),
    }
    samples = interleave(calls, rounds=1, clock=WallClock(clock))
    assert "".join(clock.calls) == "aaa" + "ab"
    assert samples == {"a": {0: 2.0}, "b": {0: 1.0}}


def test_untimed_calls_come_right_before_the_timed_one() -> None:
    clock = Clock()
    calls = {
        "a": TimedCall(clock.call("a", 1.0), warmup=0, untimed=2),
        "b": TimedCall(clock.call("b", 1.0), warmup=0),
    }
    samples = interleave(calls, rounds=2, clock=WallClock(clock))
    assert "".join(clock.calls) == "aaab" + "baaa"
    assert samples["a"] == {0: 1.0, 1: 1.0}


def test_a_slow_call_runs_in_fewer_rounds_which_the_others_share() -> None:
    clock = Clock()
    calls = {
        "quick": TimedCall(clock.call("quick", 1.0), warmup=0),
        "slow": TimedCall(clock.call("slow", 9.0), every=4, warmup=0),
        "medium": TimedCall(clock.call("medium", 3.0), every=2, warmup=0),
    }
    samples = interleave(calls, rounds=10, clock=WallClock(clock))
    assert list(samples["slow"]) == [0, 4, 8]
    assert list(samples["medium"]) == [0, 2, 4, 6, 8]
    assert ratio(samples["slow"], samples["quick"]) == Spread(9.0, 9.0, 9.0)
    assert ratio(samples["slow"], samples["medium"]) == Spread(3.0, 3.0, 3.0)


def test_the_clock_is_read_after_the_device_has_finished() -> None:
    clock = Clock()

    def synchronize() -> None:
        clock.now += 10.0

    calls = {"a": TimedCall(clock.call("a", 1.0), warmup=0)}
    samples = interleave(calls, rounds=1, clock=WallClock(clock, synchronize))
    assert samples == {"a": {0: 11.0}}


def test_ratio_is_of_calls_in_the_same_round() -> None:
    # The machine is ten times slower in round 1: the ratio of each round is 2, that of unpaired calls would not be.
    often, seldom = {0: 2.0, 1: 20.0, 2: 2.0, 3: 7.0}, {0: 1.0, 1: 10.0, 2: 1.0}
    assert ratio(often, seldom) == Spread(2.0, 2.0, 2.0)
    assert ratio(seldom, often) == Spread(0.5, 0.5, 0.5)


def test_every_call_advances_the_progress() -> None:
    clock, advanced = Clock(), list[str]()
    calls = {
        "a": TimedCall(clock.call("a", 1.0), untimed=1),
        "b": TimedCall(clock.call("b", 1.0), every=2),
    }
    interleave(calls, rounds=2, clock=WallClock(clock), advance=lambda name, calls: advanced.extend(name * calls))
    assert advanced == clock.calls


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
