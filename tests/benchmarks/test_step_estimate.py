"""Estimates of a step: the line they follow, and the parts they are made from."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.losses import estimate
from benchmarks.losses.contenders import DELTAS, SyntheticLogits, count_operations, draw_logits
from benchmarks.losses.estimate import StepPart, estimate_step, extrapolate
from benchmarks.timing import WallClock


@pytest.mark.parametrize("overhead", [0.0, 0.5])
def test_a_line_is_continued(overhead: float) -> None:
    def seconds(cost: int) -> float:
        return overhead + 0.001 * cost

    small, large = StepPart(1, 50, seconds(50)), StepPart(2, 100, seconds(100))
    assert extrapolate(small, large, 70_000) == pytest.approx(seconds(70_000))


def test_noise_cannot_turn_the_line_down_or_make_it_steeper_than_in_proportion() -> None:
    assert extrapolate(StepPart(1, 50, 1.1), StepPart(2, 100, 1.0), 1000) == pytest.approx(10.0)
    assert extrapolate(StepPart(1, 99, 0.0), StepPart(2, 100, 1.0), 1000) == pytest.approx(10.0)


class Machine:
    """A machine with a fixed time per operation that records the positives of each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
        self.rate = rate
        self.seen: list[int] = []
        monkeypatch.setattr(estimate, "loss_step", self.step)
        monkeypatch.setattr(estimate, "seconds_of", lambda call, clock: call())

    def step(self, name: str, loss: str | None, data: SyntheticLogits, **_: object) -> Callable[[], float]:
        counts = data.counts(DELTAS[loss or "ap"])
        self.seen.append(counts.positives)
        return lambda: 0.01 + self.rate * count_operations(name, loss, counts)


@pytest.mark.parametrize("rate", [1e-7, 1e-9])
@pytest.mark.parametrize("name", ["pairwise", "bucketed"])
@pytest.mark.parametrize("loss", ["ap", "rs"])
def test_a_machine_that_follows_the_formula(monkeypatch: pytest.MonkeyPatch, loss: str, name: str, rate: float) -> None:
    data = draw_logits(20_000, 20.0, seed=0)
    machine = Machine(monkeypatch, rate)
    expected = 0.01 + machine.rate * count_operations(name, loss, data.counts(DELTAS[loss]))
    seconds, parts = estimate_step(name, loss, data, apart=0.05, clock=WallClock())
    assert seconds == pytest.approx(expected)
    if expected > 1:
        assert max(machine.seen) < 4000, "only parts ran"
        small, large = parts
        assert small.positives < large.positives == max(machine.seen)
        assert large.seconds - small.seconds >= 0.05


def test_a_quick_step_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    data = draw_logits(20_000, 5.0, seed=0)
    machine = Machine(monkeypatch, rate=1e-12)
    estimate = estimate_step("pairwise", "ap", data, apart=0.05, clock=WallClock())
    assert estimate.seconds == pytest.approx(0.01, rel=0.1)
    assert estimate.parts == ()
    # One positive as warm-up, then all, because 8 x 1000 x 20,000 is less than 2e8 operations.
    assert machine.seen == [1, 1000]
    machine.seen.clear()
    # A quarter of 512, 512 (8 x 512 x 40,000 operations), and all, because these take too little time.
    estimate_step("pairwise", "ap", draw_logits(40_000, 5.0, seed=0), apart=0.05, clock=WallClock())
    assert machine.seen == [1, 128, 512, 2000]
    machine.seen.clear()
    estimate_step("exact-torch", "ap", data, apart=0.05, clock=WallClock())
    assert machine.seen == [1000]


def test_fewer_positives_than_the_smallest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, rate=1.0)
    estimate_step("pairwise", "rs", draw_logits(1000, 0.3, seed=0), apart=0.05, clock=WallClock())
    assert machine.seen == [1, 3]
