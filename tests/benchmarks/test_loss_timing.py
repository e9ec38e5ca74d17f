"""The benchmark of the losses on few logits: what it measures, what it skips, and how it reports failures."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.losses import contenders, measure
from benchmarks.losses.contenders import SyntheticLogits, draw_logits
from benchmarks.losses.estimate import StepEstimate, StepPart
from benchmarks.losses.measure import contenders_of, every_nth, measure_losses
from benchmarks.losses.memory import MemoryJob
from benchmarks.losses.results import LossBench, LossBenchSettings
from benchmarks.session import MIN_ROUNDS, MeasurementError
from tests.benchmarks.progress_recorder import ProgressRecorder

TINY = LossBenchSettings(sizes=(400, 1000), percent=(1.0, 5.0), repeats=4, memory=False)


@pytest.fixture(scope="module")
def progress() -> ProgressRecorder:
    """Return what the measurement of ``bench`` announced and did."""
    return ProgressRecorder()


@pytest.fixture(scope="module")
def bench(progress: ProgressRecorder) -> LossBench:
    return measure_losses(TINY, progress)


def test_every_contender_is_measured_in_every_cell(bench: LossBench, progress: ProgressRecorder) -> None:
    assert len(bench.results) == 4 * len(contenders_of(TINY)) == 4 * 11
    for result in bench.results:
        if result.contender == "exact-fused" and result.skipped:
            continue  # without numba
        assert result.skipped is None
        assert result.seconds is not None
        assert sorted(result.samples) == [0, 1, 2, 3]
        assert result.to_focal is not None
        assert result.flops > 0
        assert (result.launches is None) == (result.contender == "exact-fused")
        assert (result.launches is None) == (result.waits is None)
    for size, percent, positives in ((400, 1.0, 4), (1000, 5.0, 50)):
        exact = bench.find("exact-torch", "rs", size, percent)
        assert exact is not None
        assert exact.positives == positives
    # The work done is the work announced.
    assert [text for text, _ in progress.stages] == ["estimating", "measuring"]
    assert progress.done == pytest.approx([total for _, total in progress.stages])


def test_the_methods_agree_on_the_loss(bench: LossBench) -> None:
    for loss in ("ap", "rs"):
        values = {r.contender: r.value for r in bench.results if (r.loss, r.size, r.percent) == (loss, 1000, 5.0)}
        assert values["pairwise"] is not None
        for name, value in values.items():
            if value is not None:
                # Bucketing by means is an approximation, the others are not.
                torch.testing.assert_close(value, values["pairwise"], rtol=1e-3 if name == "bucketed" else 1e-5, atol=0)


def test_baselines_are_shared_by_the_losses(bench: LossBench) -> None:
    assert bench.find("focal", "ap", 400, 5.0) is bench.find("focal", "rs", 400, 5.0) is not None
    assert bench.find("focal", "ap", 401, 5.0) is None


@pytest.mark.slow
def test_a_contender_that_is_slow_by_estimate_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimate(name: str, loss: str | None, data: SyntheticLogits, **_: object) -> StepEstimate:
        return (
            StepEstimate(100.0, (StepPart(1, 1000, 0.01), StepPart(2, 2000, 0.02)))
            if name == "pairwise"
            else StepEstimate(0.001)
        )

    stepped = set()

    def step(name: str, loss: str | None, data: SyntheticLogits, **mode: Any) -> Callable[[], Any]:
        stepped.add((name, int((data.targets > 0).sum())))
        return contenders.loss_step(name, loss, data, **mode)

    monkeypatch.setattr(measure, "estimate_step", estimate)
    monkeypatch.setattr(measure, "loss_step", step)
    monkeypatch.setattr(measure, "extrapolate", lambda small, large, cost: 70.0)
    bench = measure_losses(TINY, ProgressRecorder())
    slow = [r for r in bench.results if r.contender == "pairwise"]
    assert len(slow) == 8
    for result in slow:
        assert result.skipped == "by estimate 4 calls would exceed 30 s"
        assert result.estimated_seconds == 70.0
        assert result.estimated_samples == {0: 70.0, 1: 70.0, 2: 70.0, 3: 70.0}
        assert (result.seconds, result.to_focal, result.value, result.extra_bytes) == (None, None, None, None)
        assert not result.samples
        assert result.flops > 0
    assert {positives for name, positives in stepped if name == "pairwise"} == {1, 2}, "only parts of it ran"
    assert ("bucketed", 50) in stepped


def test_estimates_follow_the_parts_round_by_round() -> None:
    entry = measure.PlannedContender(
        "pairwise", "ap", 400, 5.0, 9.0, "too long", (StepPart(4, 100, 0.0), StepPart(8, 200, 0.0))
    )
    samples = {"AP pairwise, 4 positives": {0: 1.0, 1: 2.0, 2: 1.0}, "AP pairwise, 8 positives": {0: 1.5, 2: 1.25}}
    # Half a second per hundred operations in round 0, a quarter in round 2.
    assert measure._estimates(entry, samples, 1200) == {0: 1.5 + 10 * 0.5, 2: 1.25 + 10 * 0.25}


def test_the_limit_decides_what_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "estimate_step", lambda *_, **__: StepEstimate(100.0))
    for limit, skips in ((301.0, False), (299.0, True)):
        settings = LossBenchSettings(sizes=(400,), percent=(5.0,), repeats=40, max_seconds_per_cell=limit, memory=False)
        progress = ProgressRecorder()
        progress.begin("estimating", len(contenders_of(settings)))
        planned = measure.plan_cell(400, 5.0, settings, progress)
        assert {entry.skipped is not None for entry in planned if entry.name != "exact-fused"} == {skips}
        assert all(len(entry.turns()) == (not skips) for entry in planned if entry.name != "exact-fused")


@pytest.mark.parametrize("repeats", range(MIN_ROUNDS, 45))
@pytest.mark.parametrize("seconds", [1e-4, 0.2, 1.0, 5.0, 9.9])
def test_slow_steps_run_rarely_but_often_enough(repeats: int, seconds: float) -> None:
    every = every_nth(seconds, LossBenchSettings(repeats=repeats, max_seconds_per_cell=60.0))
    calls = math.ceil(repeats / every)
    assert calls >= MIN_ROUNDS
    assert every & (every - 1) == 0, "a power of two"
    # Another halving would have been too few, or the time is small.
    assert calls * seconds <= 10.0 or math.ceil(repeats / (2 * every)) < MIN_ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("when", ["estimating", "measuring"])
def test_a_failure_names_the_cell(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def broken(name: str, loss: str | None, data: SyntheticLogits, **_: object) -> Callable[[], float]:
        def call() -> float:
            if name == "bucketed" and loss == "rs" and data.logits.numel() == 1000:
                raise ZeroDivisionError("no such luck")
            return 1.0

        return call

    module = "estimate" if when == "estimating" else "measure"
    monkeypatch.setattr(f"benchmarks.losses.{module}.loss_step", broken)
    with pytest.raises(MeasurementError, match=r"RS bucketed at L = 1000, 1 % positives: no such luck"):
        measure_losses(TINY, ProgressRecorder())


def test_a_loss_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measure, "loss_step", lambda name, loss, data, **_: lambda: math.nan if name == "exact-torch" else 1.0
    )
    with pytest.raises(
        MeasurementError, match=r"AP exact-torch at L = 400, 1 % positives: expected a finite loss, got nan"
    ):
        measure_losses(TINY, ProgressRecorder())


@pytest.mark.slow
def test_memory_is_measured_for_every_contender_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter:
        modes, start_seconds = ("eager",), 0.0

        def __enter__(self) -> Meter:
            return self

        def __exit__(self, *_: object) -> None: ...

        def measure(self, job: MemoryJob) -> int:
            if job["name"] == "bce":
                raise RuntimeError("out of memory")
            return job["size"] + (job["loss"] == "rs")

    monkeypatch.setattr(measure, "memory_meter", lambda _: Meter())
    settings = LossBenchSettings(sizes=(400,), percent=(5.0,), repeats=3)
    with pytest.raises(MeasurementError, match="memory of bce at L = 400, 5 % positives: out of memory"):
        measure_losses(settings, ProgressRecorder())
    contenders = [("focal", None, "eager"), ("pairwise", "rs", "eager")]
    monkeypatch.setattr(measure, "contenders_of", lambda _: contenders)
    assert [r.extra_bytes for r in measure_losses(settings, ProgressRecorder()).results] == [400, 401]


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
        LossBenchSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_compiled_losses_are_measured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # The graphs are traced for real; only the C++ compiler is left out, which takes seconds for each.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(contenders, "_compiled", {})
    settings = LossBenchSettings(sizes=(300,), percent=(5.0,), repeats=3, memory=False, compiled=True)
    bench = measure_losses(settings, ProgressRecorder())
    compiled = [result for result in bench.results if result.mode == "compiled"]
    assert {result.contender for result in compiled} >= {"focal", "bce", "bucketed", "exact-torch"}
    for result in compiled:
        eager = bench.find(result.contender, result.loss, 300, 5.0)
        assert eager is not None
        assert result.skipped == eager.skipped
        assert (result.launches, result.extra_bytes) == (None, None)
        torch.testing.assert_close(result.value, eager.value, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_compiled_losses_do_not_share_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(contenders, "_compiled", {})
    # More shapes than torch.compile takes of one function by default.
    for size in range(20, 20 + torch._dynamo.config.recompile_limit + 2):
        step = contenders.loss_step("focal", None, draw_logits(size, 5.0, seed=0), mode="compiled")
        assert math.isfinite(step())
    assert len(contenders._compiled) == torch._dynamo.config.recompile_limit + 2
