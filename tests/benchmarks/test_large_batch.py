"""The benchmark of a large batch, here with few logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks.losses import measure
from benchmarks.losses.contenders import SyntheticLogits, why_unavailable
from benchmarks.losses.measure import measure_large_batch
from benchmarks.losses.memory import CLEAR_REFS
from benchmarks.losses.results import LossBenchSettings
from tests.benchmarks.progress_recorder import ProgressRecorder


@pytest.mark.slow
@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="the record of the largest size can only be reset on Linux")
def test_time_and_memory_of_every_cell() -> None:
    progress = ProgressRecorder()
    results = measure_large_batch(LossBenchSettings(), progress, size=400_000)
    names = ["exact-torch"] if why_unavailable("exact-fused", "cpu") else ["exact-torch", "exact-fused"]
    cells = [(positives, loss, name) for positives in (400, 2000) for loss in ("ap", "rs") for name in names]
    assert [(r.positives, r.loss, r.contender) for r in results] == cells
    for result in results:
        assert result.logit_bytes == 1_600_000
        # At least the gradient.
        assert 1_500_000 <= result.extra_bytes < 200_000_000
        assert result.seconds.median > 0
    assert progress.done == pytest.approx([total for _, total in progress.stages])


def test_which_times_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"as sparse": 2.0, "as many": 3.0, "all": 60.0, "focal part": 4.0, "focal": 400.0}
    drawn: list[tuple[int, int]] = []

    def step(_: str, __: str | None, data: SyntheticLogits) -> Callable[[], float]:
        drawn.append((data.logits.numel(), int((data.targets > 0).sum())))
        return lambda: 0.0

    class Meter(nullcontext[None]):
        def __enter__(self) -> Any:
            return self

        def measure(self, _: object) -> int:
            return 1

    monkeypatch.setattr(measure, "loss_step", step)
    monkeypatch.setattr(measure, "memory_meter", lambda _: Meter())
    monkeypatch.setattr(
        measure, "interleave", lambda calls, **_: {name: dict.fromkeys(range(2), seconds[name]) for name in calls}
    )
    result = measure_large_batch(LossBenchSettings(), ProgressRecorder(), size=40_000)[0]
    assert drawn[:5] == [(2_000, 2), (2_000, 40), (40_000, 40), (2_000, 2), (40_000, 40)]
    assert (result.growth.median, result.growth_in_logits.median) == (30.0, 20.0)
    assert (result.focal_growth.median, result.to_focal.median) == (100.0, 0.15)
