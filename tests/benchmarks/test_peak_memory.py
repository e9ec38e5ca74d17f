"""Peak memory, measured in real processes on allocations of known size."""

from __future__ import annotations

import pytest

from benchmarks.losses.memory import CLEAR_REFS, MemoryJob, MemoryMeter

pytestmark = pytest.mark.skipif(
    not CLEAR_REFS.exists(), reason="the record of the largest size can only be reset on Linux"
)


def job(name: str, loss: str | None = None, size: int = 1_000_000) -> MemoryJob:
    return MemoryJob(name=name, loss=loss, size=size, percent=1.0, seed=0, device="cpu", threads=1, mode="eager")


@pytest.mark.slow
def test_known_allocations_and_errors() -> None:
    with MemoryMeter() as meter:
        # A sorted copy (4 bytes per logit), its indices (8 bytes), and the working memory of the sort.
        assert 12e6 <= meter.measure(job("sort")) <= 60e6
        # The gradient alone takes 4 bytes per logit.
        assert 4e6 <= meter.measure(job("bce")) <= 40e6
        # All comparisons at once would be 40 GB.
        assert 4e6 <= meter.measure(job("exact-torch", "ap")) <= 200e6
        with pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
            meter.measure(job("nobody", "ap", 1000))
        # The meter still works after an error.
        assert meter.measure(job("sort", size=1000)) < 4e6
