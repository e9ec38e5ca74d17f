"""The study on few logits: everything is measured, what is slow is skipped and says so, what fails says where."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bucketrank.bench import contenders, losses, plan
from bucketrank.bench.estimate import Estimate, Part
from bucketrank.bench.flags import FEWEST_ROUNDS
from bucketrank.bench.losses import run
from bucketrank.bench.memory import Job
from bucketrank.bench.plan import NAMES, every_nth
from bucketrank.bench.study import CellError, Settings
from bucketrank.bench.synthetic import Synthetic

TINY = Settings(sizes=(400, 1000), percent=(1.0, 5.0), repeats=4, memory=False)


class Listener:
    """A progress bar that only adds up."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float]] = []
        self.done: list[float] = []
        self.texts: list[str] = []

    def begin(self, text: str, total: float) -> None:
        self.stages.append((text, total))
        self.done.append(0.0)

    def advance(self, text: str, amount: float) -> None:
        self.done[-1] += amount
        self.texts.append(text)


def test_every_contender_is_measured_in_every_cell() -> None:
    listener = Listener()
    study = run(TINY, listener)
    assert len(study.results) == 4 * len(NAMES) == 4 * 11
    for result in study.results:
        if result.contender == "exact-fused" and result.skipped:
            continue  # without numba
        assert result.skipped is None
        assert result.seconds is not None
        assert result.seconds.low <= result.seconds.median <= result.seconds.high
        assert sorted(result.samples) == [0, 1, 2, 3]
        assert result.to_focal is not None
        assert result.flops > 0
    for size, percent, positives in ((400, 1.0, 4), (1000, 5.0, 50)):
        found = study.find("exact-torch", "rs", size, percent)
        assert found is not None
        assert found.positives == positives
    # What was announced is what was done.
    assert [text for text, _ in listener.stages] == ["estimating", "measuring"]
    assert listener.done == pytest.approx([total for _, total in listener.stages])


def test_the_methods_agree_on_the_loss() -> None:
    study = run(TINY, Listener())
    for loss in ("ap", "rs"):
        values = {r.contender: r.value for r in study.results if (r.loss, r.size, r.percent) == (loss, 1000, 5.0)}
        assert values["pairwise"] is not None
        for name, value in values.items():
            if value is not None:
                # Bucketing by means is an approximation, the others are not.
                torch.testing.assert_close(value, values["pairwise"], rtol=1e-3 if name == "bucketed" else 1e-5, atol=0)


def test_baselines_are_shared_by_the_losses() -> None:
    study = run(Settings(sizes=(300,), percent=(5.0,), repeats=3, memory=False), Listener())
    assert study.find("focal", "ap", 300, 5.0) is study.find("focal", "rs", 300, 5.0)
    assert study.find("focal", "ap", 301, 5.0) is None


def test_what_is_slow_by_estimate_is_skipped_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimate(name: str, loss: str | None, data: Synthetic, **_: object) -> Estimate:
        return Estimate(100.0, (Part(1, 1000, 0.01), Part(2, 2000, 0.02))) if name == "pairwise" else Estimate(0.001)

    called = set()

    def step(name: str, loss: str | None, data: Synthetic) -> Callable[[], float]:
        called.add((name, int((data.targets > 0).sum())))
        return contenders.step(name, loss, data)

    monkeypatch.setattr(plan, "estimate", estimate)
    monkeypatch.setattr(plan, "step", step)
    monkeypatch.setattr(losses, "extrapolate", lambda small, large, cost: 70.0)
    study = run(TINY, Listener())
    slow = [r for r in study.results if r.contender == "pairwise"]
    assert len(slow) == 8
    for result in slow:
        assert result.skipped == "by estimate 4 calls would exceed 30 s"
        assert result.estimated_seconds == 70.0
        assert result.estimated_samples == {0: 70.0, 1: 70.0, 2: 70.0, 3: 70.0}
        assert (result.seconds, result.to_focal, result.value, result.extra_bytes) == (None, None, None, None)
        assert not result.samples
        assert result.flops > 0
    assert {positives for name, positives in called if name == "pairwise"} == {1, 2}, "only parts of it ran"
    assert ("bucketed", 50) in called


def test_estimates_follow_the_parts_round_by_round() -> None:
    entry = plan.Planned("pairwise", "ap", 400, 5.0, 9.0, "too long", (Part(4, 100, 0.0), Part(8, 200, 0.0)))
    samples = {"AP pairwise, 4 positives": {0: 1.0, 1: 2.0, 2: 1.0}, "AP pairwise, 8 positives": {0: 1.5, 2: 1.25}}
    # In round 0 a half second for each hundred operations, in round 2 a quarter.
    assert losses._estimates(entry, samples, 1200) == {0: 1.5 + 10 * 0.5, 2: 1.25 + 10 * 0.25}


def test_a_higher_limit_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "estimate", lambda *_, **__: Estimate(100.0))
    for limit, skips in ((301.0, False), (299.0, True)):
        settings = Settings(sizes=(400,), percent=(5.0,), repeats=40, max_seconds_per_cell=limit, memory=False)
        listener = Listener()
        listener.begin("estimating", len(NAMES))
        planned = plan.plan(400, 5.0, settings, listener)
        assert {entry.skipped is not None for entry in planned if entry.name != "exact-fused"} == {skips}
        assert all(len(entry.turns()) == (not skips) for entry in planned if entry.name != "exact-fused")


@pytest.mark.parametrize("repeats", range(FEWEST_ROUNDS, 45))
@pytest.mark.parametrize("seconds", [1e-4, 0.2, 1.0, 5.0, 9.9])
def test_slow_steps_run_rarely_but_often_enough(repeats: int, seconds: float) -> None:
    every = every_nth(seconds, Settings(repeats=repeats, max_seconds_per_cell=60.0))
    calls = math.ceil(repeats / every)
    assert calls >= FEWEST_ROUNDS
    assert every & (every - 1) == 0, "a power of two"
    # Another halving would have been too few, or the time is small.
    assert calls * seconds <= 10.0 or math.ceil(repeats / (2 * every)) < FEWEST_ROUNDS


@pytest.mark.parametrize("when", ["estimating", "measuring"])
def test_a_failure_names_the_cell(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def broken(name: str, loss: str | None, data: Synthetic) -> Callable[[], float]:
        def call() -> float:
            if name == "bucketed" and loss == "rs" and data.logits.numel() == 1000:
                raise ZeroDivisionError("no such luck")
            return 1.0

        return call

    module = "estimate" if when == "estimating" else "plan"
    monkeypatch.setattr(f"bucketrank.bench.{module}.step", broken)
    with pytest.raises(CellError, match=r"RS bucketed at L = 1000, 1 % positives: no such luck"):
        run(TINY, Listener())


def test_a_loss_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "step", lambda name, loss, data: lambda: math.nan if name == "exact-torch" else 1.0)
    with pytest.raises(CellError, match=r"AP exact-torch at L = 400, 1 % positives: expected a finite loss, got nan"):
        run(TINY, Listener())


def test_memory_is_asked_of_every_contender_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter:
        def __enter__(self) -> Meter:
            return self

        def __exit__(self, *_: object) -> None: ...

        def measure(self, job: Job) -> int:
            if job["name"] == "bce":
                raise RuntimeError("out of memory")
            return job["size"] + (job["loss"] == "rs")

    monkeypatch.setattr(losses, "MemoryMeter", Meter)
    settings = Settings(sizes=(400,), percent=(5.0,), repeats=3)
    with pytest.raises(CellError, match="memory of bce at L = 400, 5 % positives: out of memory"):
        run(settings, Listener())
    monkeypatch.setattr(plan, "NAMES", [("focal", None), ("pairwise", "rs")])
    assert [r.extra_bytes for r in run(settings, Listener()).results] == [400, 401]


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ({"sizes": ()}, "--sizes"),
        ({"sizes": (1,)}, "--sizes"),
        ({"percent": (0.0,)}, "--percent"),
        ({"repeats": 2}, "--repeats"),
        ({"max_seconds_per_cell": 0.0}, "--max-seconds-per-cell"),
        ({"device": "abacus"}, "--device"),
    ],
)
def test_wrong_settings_name_the_flag(wrong: dict[str, object], flag: str) -> None:
    with pytest.raises(ValueError, match=f"^{flag}: expected"):
        Settings(**wrong)  # type: ignore[arg-type]
